# Tests under a sanitizer: how they are run, and what is left out of them, with the reason. A test that is left out is
# listed by ctest as disabled and is not built. Single cases of scripts say themselves why they are skipped.

set(THERMO_TEST_TIMEOUT 1800)  # seconds, enough for portable code on a busy machine
if(THERMO_SANITIZE)
  set(THERMO_TEST_TIMEOUT 3600)
endif()

# "regular expression of names|reason"
set(THERMO_LEFT_OUT)

if(THERMO_SANITIZE)
  list(APPEND THERMO_LEFT_OUT
    "_avx2$|the same code once more with other kernels, and the test of kernels goes through every instruction set"
    "^same_bits$|minutes of arithmetic without a sanitizer: it compares numbers, and the test of the model goes the same ways"
    "^draft_parity|it compares texts, and the tests of the engine draft in the same ways")
endif()

if(THERMO_SANITIZE MATCHES "thread")
  list(APPEND THERMO_LEFT_OUT
    "^(tensor|gguf|safetensors|jinja|tokenizer|grammar|kernels|sampling|speculative|embedded|hub|chat|cli)$|one thread, or the threads of other tests"
    "^fuzz_|one thread"
    "^(layers|cuda_flags|documents|jinja_parity|eval_code)$|no threads of ours"
    "^end_to_end_(commands|failures|tools|terminal|prompt|format|models|serve_clients)$|the threads of other tests: what is compared is text")
endif()

# Why a test is left out; empty: it is not.
function(thermo_left_out name reason)
  set(${reason} "" PARENT_SCOPE)
  foreach(rule IN LISTS THERMO_LEFT_OUT)
    string(REGEX MATCH "^(.*)\\|([^|]*)$" _ "${rule}")
    set(why "${CMAKE_MATCH_2}")
    if(name MATCHES "${CMAKE_MATCH_1}")
      set(${reason} "${why}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
endfunction()

# thermo_test(name COMMAND ...): as add_test. Programs of ours are named as $<TARGET_FILE:...>. A test that exits with 77 was
# skipped and has said why.
function(thermo_test name)
  cmake_parse_arguments(ARG "" "" "COMMAND" ${ARGN})
  thermo_left_out(${name} reason)
  if(reason)
    message(STATUS "left out under -fsanitize=${THERMO_SANITIZE}: ${name} (${reason})")
    set(ARG_COMMAND ${CMAKE_COMMAND} -E false)
  elseif(THERMO_SANITIZE)
    list(PREPEND ARG_COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tests/sanitized.py ${CMAKE_BINARY_DIR}/reports/${name})
  endif()
  add_test(NAME ${name} COMMAND ${ARG_COMMAND})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
  if(reason)
    set_tests_properties(${name} PROPERTIES DISABLED ON)
  endif()
endfunction()
