// A minimal test frame: CHECK counts what holds and what does not, and prints the latter; report() is what main returns.
#pragma once

#include <atomic>
#include <cstdio>
#include <map>
#include <string>

inline std::atomic<long> checks{0}, failures{0};
inline std::map<std::string, long> runs;  // of each kind of work at each level

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    ++checks;                                                              \
    if (!(condition) && ++failures <= 20) {                                \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);          \
      std::printf(__VA_ARGS__);                                            \
      std::printf("\n");                                                   \
    }                                                                      \
  } while (false)

inline int report() {
  for (const auto& [work, count] : runs) std::printf("%s: %ld runs\n", work.c_str(), count);
  std::printf("%ld of %ld checks hold\n", checks - failures, checks.load());
  return failures || !checks ? 1 : 0;
}
