// A minimal test frame: CHECK counts failures and prints them; report() is what main returns.
#pragma once

#include <cstdio>

inline int failures = 0;

#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition) && ++failures <= 20) {                                \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);          \
      std::printf(__VA_ARGS__);                                            \
      std::printf("\n");                                                   \
    }                                                                      \
  } while (false)

inline int report() {
  if (failures) std::printf("%d checks failed\n", failures);
  return failures ? 1 : 0;
}
