#!/bin/sh
# with_avx2.sh COMMAND...: runs a test once more, as on a processor without AVX-512. A limit that is set already holds for the
# first run as well; then there is nothing left to do, and 77 says so to ctest.
if [ -n "$THERMO_MAX_ISA" ]; then
  echo "skipped: THERMO_MAX_ISA=$THERMO_MAX_ISA holds for all tests"
  exit 77
fi
THERMO_MAX_ISA=avx2 exec "$@"
