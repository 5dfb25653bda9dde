// Defines the build stamp. slipstream_tf/ops/_loader.py searches the library file for this text
// before it loads the library, because a library built for another TensorFlow may load without an
// error and then misbehave. The C++ ABI is the ABI of libstdc++, whose headers define the macro if
// the compiler's flags do not.
#include <string>

#define SLIPSTREAM_TEXT_OF(x) #x
#define SLIPSTREAM_TEXT(x) SLIPSTREAM_TEXT_OF(x)

#ifdef SLIPSTREAM_WITH_CUDA
#define SLIPSTREAM_CUDA_FLAG "1"
#else
#define SLIPSTREAM_CUDA_FLAG "0"
#endif

#ifndef _GLIBCXX_USE_CXX11_ABI
#define _GLIBCXX_USE_CXX11_ABI 1
#endif

// clang-format off
extern "C" __attribute__((used, visibility("default"))) const char slipstream_build_info[] =
    "slipstream-build:tf=" SLIPSTREAM_TEXT(SLIPSTREAM_TF_MAJOR)
    "." SLIPSTREAM_TEXT(SLIPSTREAM_TF_MINOR)
    "." SLIPSTREAM_TEXT(SLIPSTREAM_TF_PATCH)
    ";cuda=" SLIPSTREAM_CUDA_FLAG
    ";cxx11abi=" SLIPSTREAM_TEXT(_GLIBCXX_USE_CXX11_ABI) ";";
// clang-format on
