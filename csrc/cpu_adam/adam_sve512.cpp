// Compiled with -march=armv8.2-a+sve -msve-vector-bits=512.

#define INFINITY_SVE_BITS 512
#include "adam_sve.inl"

const infinity::Kernels* infinity::sve512_kernels() { return sve::kFound; }
