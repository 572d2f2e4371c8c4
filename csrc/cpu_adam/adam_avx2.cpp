// Eight floats side by side. Compiled with -mavx2 -mf16c; called only where both exist.

#include "adam.h"
#include "rules.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace infinity {
namespace avx2 {
namespace {

struct Bf16;
struct F16;

struct Vector {
  static constexpr int width = 8;
  using F = __m256;
  using D = __m256d;
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static F load(const Bf16* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half(p)), 16));
  }
  static F load(const F16* p) { return _mm256_cvtph_ps(half(p)); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void store(Bf16* p, F x) { put(p, bf16(x)); }
  static void store(F16* p, F x) { put(p, f16(x)); }
  static void stream(float* p, F x, F y) {
    _mm256_stream_ps(p, x);
    _mm256_stream_ps(p + width, y);
  }
  static void stream(Bf16* p, F x, F y) { put_past(p, bf16(x), bf16(y)); }
  static void stream(F16* p, F x, F y) { put_past(p, f16(x), f16(y)); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static constexpr int doubles = 2;
  static void widen(F x, D* d) {
    d[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    d[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  }
  static D dadd(D a, D b) { return _mm256_add_pd(a, b); }
  static D dmul(D a, D b) { return _mm256_mul_pd(a, b); }
  static D dset(double x) { return _mm256_set1_pd(x); }
  static F narrow(const D* d) { return _mm256_set_m128(_mm256_cvtpd_ps(d[1]), _mm256_cvtpd_ps(d[0])); }
  static void dstore(double* p, D a) { _mm256_storeu_pd(p, a); }
  static void fence() { _mm_sfence(); }
  static F sign(F x, F size) {
    F bit = _mm256_set1_ps(-0.0f), some = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    F sized = _mm256_and_ps(size, _mm256_or_ps(some, bit));
    return _mm256_xor_ps(sized, _mm256_and_ps(some, _mm256_and_ps(x, bit)));
  }
  using U = __m256i;
  static U uset(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static U count() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static U uadd(U a, U b) { return _mm256_add_epi32(a, b); }
  static U umul(U a, U b) { return _mm256_mullo_epi32(a, b); }
  static U uxor(U a, U b) { return _mm256_xor_si256(a, b); }
  template <int n>
  static U down(U a) {
    return _mm256_srli_epi32(a, n);
  }
  template <int n>
  static U up(U a) {
    return _mm256_slli_epi32(a, n);
  }
  static U low16(U a) { return _mm256_and_si256(a, _mm256_set1_epi32(0xffff)); }
  static U uand(U a, U b) { return _mm256_and_si256(a, b); }
  static U uor(U a, U b) { return _mm256_or_si256(a, b); }
  static U usub(U a, U b) { return _mm256_sub_epi32(a, b); }
  static U imin(U a, U b) { return _mm256_min_epi32(a, b); }
  static U imax(U a, U b) { return _mm256_max_epi32(a, b); }
  static U where_not_zero(U a, U b) {
    return _mm256_andnot_si256(_mm256_cmpeq_epi32(a, _mm256_setzero_si256()), b);
  }
  static U bits(F x) { return _mm256_castps_si256(x); }
  static F floats(U a) { return _mm256_castsi256_ps(a); }
  static void ustore(uint32_t* p, U a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a); }
  static U load_codes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_codes(uint8_t* p, U a) {
    __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(half, half));
  }
  static void store_upper(uint16_t* p, U a) { put(p, upper(a)); }
  static void store_rounded(float* p, F x, U) { store(p, x); }
  static void store_rounded(Bf16* p, F x, U below) {
    __m256i sum = _mm256_add_epi32(_mm256_castps_si256(x), below);
    put(p, upper(_mm256_or_si256(sum, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)))));
  }

 private:
  static __m128i half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void put(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }
  static void put_past(void* p, __m128i x, __m128i y) {
    _mm256_stream_si256(static_cast<__m256i*>(p), _mm256_set_m128i(y, x));
  }
  // To nearest, ties to even, with integers: no instruction for it exists here, and the one that
  // newer processors have flushes subnormals.
  static __m128i bf16(F x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return upper(_mm256_or_si256(sum, nan));
  }
  static __m128i upper(__m256i bits) {
    __m256i kept = _mm256_srli_epi32(bits, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
  }
  static __m128i f16(F x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
};

#include "adam_lane.inl"

const Kernels kKernels = {"avx2", update_any, traffic_any, sum_any, accumulate_any, convert_any};

}  // namespace
}  // namespace avx2

const Kernels* avx2_kernels() { return &avx2::kKernels; }

}  // namespace infinity
#else
namespace infinity {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace infinity
#endif
