// Compiled with -march=armv8.2-a+sve -msve-vector-bits=256.

#define INFINITY_SVE_BITS 256
#include "adam_sve.inl"

const infinity::Kernels* infinity::sve256_kernels() { return sve::kFound; }
