"""The SDK inside other libraries: a package each, and nothing outside of a package knows its library's internals."""
