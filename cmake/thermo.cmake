# Helpers that keep the folders' build files to a line each.

set(THERMO_WARNINGS -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND THERMO_WARNINGS -Wno-restrict)  # GCC 12 reports std::string concatenation (its bug 105651)
endif()
# Compilers after those that the code was tried with may warn of more: that must not keep anybody from building it.
if(THERMO_WERROR AND NOT (CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13))
  list(APPEND THERMO_WARNINGS -Werror)
endif()

# What every target of ours shares.
add_library(thermo_flags INTERFACE)
target_include_directories(thermo_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
target_compile_options(thermo_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${THERMO_WARNINGS}>)
# Constant expressions of the shared headers are used in kernels too.
target_compile_options(thermo_flags INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
if(THERMO_CUDA)
  target_compile_definitions(thermo_flags INTERFACE THERMO_HAS_CUDA)
endif()
# -O1: files take half as long to compile. Null pointers, types and sizes of objects are left to the address sanitizer, which
# sees the accesses themselves. GCC 12 takes an optional that is empty for one that was not initialized when a sanitizer keeps
# it from inlining.
if(THERMO_SANITIZE)
  target_compile_options(thermo_flags INTERFACE -fsanitize=${THERMO_SANITIZE} -fno-omit-frame-pointer -g1 -O1
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  if(THERMO_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(thermo_flags INTERFACE -Wno-tsan)  # Asio has fences; what they order has locks, too
  endif()
  if(THERMO_SANITIZE MATCHES "undefined")
    target_compile_options(thermo_flags INTERFACE -fno-sanitize=null,vptr,object-size)
  endif()
  target_link_options(thermo_flags INTERFACE -fsanitize=${THERMO_SANITIZE})
  if(THERMO_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    set(THERMO_KERNELS_LINK_OPTIONS -Wl,--undefined=thermo_asan_access)  # src/kernels/asan_access.cpp
  endif()
endif()

# Files named for an instruction set are compiled for it; everything else is plain x86-64 (or the target's
# base), so that the program starts on any machine and chooses at run time. GCC 12's AVX-512 headers read an
# undefined vector on purpose (its bug 105593), hence the two warnings that are off. No contraction: a product and a sum become one
# rounding where the code says so (vfma) and nowhere else, so that two loops over the same numbers give the same bits.
function(thermo_isa_flags)
  foreach(file IN LISTS ARGN)
    if(file MATCHES "_portable\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "-ffp-contract=off")
    endif()
  endforeach()
  if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    return()
  endif()
  # Unrolled kernels under the undefined-behaviour sanitizer take the compiler ten minutes a file; the address sanitizer sees them all
  # the same. It calls a function for each access here, and does not watch when the lambdas' variables end: a file takes 40 seconds
  # instead of 150. The thread sanitizer leaves kernels out: they know no threads, and with it a model would be ten times slower. It sees
  # who calls them and what orders the calls.
  set(quick "")
  if(THERMO_SANITIZE MATCHES "thread")
    set(quick ";-fno-sanitize=all;-O1")
  elseif(THERMO_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(quick ";-fno-sanitize=undefined;-O1;-fno-sanitize-address-use-after-scope;--param=asan-instrumentation-with-call-threshold=0")
  elseif(THERMO_SANITIZE)
    set(quick ";-fno-sanitize=undefined;-O1")
  endif()
  set(more_512 "${quick}")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(more_512 ";-Wno-uninitialized;-Wno-maybe-uninitialized${quick}")
  endif()
  foreach(file IN LISTS ARGN)
    if(file MATCHES "_avx2\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "-ffp-contract=off;-mavx2;-mfma;-mf16c;-mbmi2${quick}")
    elseif(file MATCHES "_avxvnni\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS
        "-ffp-contract=off;-mavx2;-mfma;-mf16c;-mbmi2;-mavxvnni${quick}")
    elseif(file MATCHES "_avx512\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS
        "-ffp-contract=off;-mavx2;-mfma;-mf16c;-mbmi2;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni;-mprefer-vector-width=512${more_512}")
    elseif(file MATCHES "_amx\\.cpp$")
      set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS
        "-ffp-contract=off;-mavx2;-mfma;-mf16c;-mbmi2;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni;-mprefer-vector-width=512;-mamx-tile;-mamx-int8${more_512}")
    endif()
  endforeach()
endfunction()

# thermo_library(name [AVX2_TOO] [APART test filter] DEPS ...): the static library thermo_<name> of src/<name>, its
# tests and its micro-benchmarks. AVX2_TOO: the tests run once more as on a processor without AVX-512. APART: the cases
# of the filter take minutes and go through every instruction set by themselves; they are a test of their own, which runs
# once. Files are found by name: x_test.cpp is a test, x_bench.cpp a benchmark. Kernels (*.cu) and the host code around them (src/device and folders
# named gpu; nvcc 13.0 cannot compile fmt) are left out without CUDA.
function(thermo_library name)
  cmake_parse_arguments(ARG "AVX2_TOO" "" "APART;DEPS" ${ARGN})
  # Relative paths: the folder of the whole project may be called anything.
  file(GLOB_RECURSE files RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS
    ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cpp)
  if(NOT THERMO_CUDA)
    list(FILTER files EXCLUDE REGEX "^device/|/gpu/")
  endif()
  file(GLOB_RECURSE cuda_files RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} CONFIGURE_DEPENDS
    ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cu)
  set(sources ${files})
  list(FILTER sources EXCLUDE REGEX "(_test|_bench|/main)\\.cpp$|/testing/|/lab/")
  set(tests ${files})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  set(benches ${files})
  list(FILTER benches INCLUDE REGEX "_bench\\.cpp$")
  set(cuda_tests ${cuda_files})
  list(FILTER cuda_tests INCLUDE REGEX "_test\\.cu$")
  list(FILTER cuda_files EXCLUDE REGEX "_test\\.cu$|/lab/")
  thermo_isa_flags(${sources})
  if(THERMO_CUDA)
    # Warpgroup products are of architecture 90a, which runs on 9.0 alone: beside the code for 90.
    foreach(file ${cuda_files})
      if(file MATCHES "wide[^/]*\\.cu$" AND "${CMAKE_CUDA_ARCHITECTURES}" MATCHES "(^|;)90(-real)?(;|$)")
        set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS
          "--generate-code=arch=compute_90a,code=[sm_90a]")
      endif()
    endforeach()
    list(APPEND sources ${cuda_files})
    list(APPEND tests ${cuda_tests})
  endif()

  if(NOT sources)  # device, without CUDA
    add_library(thermo_${name} INTERFACE)
    target_link_libraries(thermo_${name} INTERFACE thermo_flags ${ARG_DEPS})
    return()
  endif()
  add_library(thermo_${name} STATIC ${sources})
  target_link_libraries(thermo_${name} PUBLIC thermo_flags ${ARG_DEPS})
  if(THERMO_CUDA AND "${sources}" MATCHES "\\.cu;|\\.cu$|^device/|/gpu/")
    target_link_libraries(thermo_${name} PUBLIC CUDA::cudart_static)
  endif()

  thermo_left_out(${name} is_left_out)
  if(THERMO_TESTS AND tests AND is_left_out)
    thermo_test(${name})
  elseif(THERMO_TESTS AND tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE thermo_${name} GTest::gmock GTest::gtest GTest::gtest_main)
    target_compile_definitions(${name}_test PRIVATE
      THERMO_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data" THERMO_MODELS="${CMAKE_SOURCE_DIR}/models")
    set(names ${name})
    set(others "")
    if(ARG_APART)
      list(GET ARG_APART 0 apart)
      list(GET ARG_APART 1 cases)
      set(others --gtest_filter=-${cases})
      thermo_test(${apart} COMMAND $<TARGET_FILE:${name}_test> --gtest_filter=${cases})
      list(APPEND names ${apart})
    endif()
    thermo_test(${name} COMMAND $<TARGET_FILE:${name}_test> ${others})
    if(ARG_AVX2_TOO)
      thermo_test(${name}_avx2 COMMAND ${CMAKE_SOURCE_DIR}/tests/with_avx2.sh $<TARGET_FILE:${name}_test> ${others})
      list(APPEND names ${name}_avx2)
    endif()
    set_tests_properties(${names} PROPERTIES TIMEOUT ${THERMO_TEST_TIMEOUT})
    if(THERMO_CUDA)
      set_tests_properties(${names} PROPERTIES RESOURCE_LOCK gpu)  # tests that fill a card run one at a time
    endif()
  endif()
  if(THERMO_BENCH AND benches)
    add_executable(${name}_bench ${benches})
    target_link_libraries(${name}_bench PRIVATE thermo_${name} benchmark::benchmark_main)
  endif()
endfunction()
