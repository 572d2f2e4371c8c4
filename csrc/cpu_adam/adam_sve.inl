// Eight or sixteen floats side by side, on 64-bit Arm with SVE: adam_sve{256,512}.cpp, each compiled for
// vectors of this length alone. Called only in threads whose vectors have it: sve_bits() in dispatch.cpp.

#include "adam.h"
#include "rules.h"

#if defined(__AARCH64EL__) && defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == INFINITY_SVE_BITS
#include <arm_sve.h>

namespace infinity {
namespace sve {
namespace {

struct Bf16;
struct F16;

struct Vector {
  static constexpr int width = INFINITY_SVE_BITS / 32;
  using F = svfloat32_t __attribute__((arm_sve_vector_bits(INFINITY_SVE_BITS)));
  using D = svfloat64_t __attribute__((arm_sve_vector_bits(INFINITY_SVE_BITS)));
  using U = svuint32_t __attribute__((arm_sve_vector_bits(INFINITY_SVE_BITS)));
  static F set(float x) { return svdup_n_f32(x); }
  static F load(const float* p) { return svld1_f32(all(), p); }
  static F load(const Bf16* p) { return floats(up<16>(half(p))); }
  static F load(const F16* p) { return svcvt_f32_f16_x(all(), svreinterpret_f16_u32(half(p))); }
  static void store(float* p, F x) { svst1_f32(all(), p, x); }
  // To nearest, ties to even, with integers: not every processor has bfcvt, whose NaNs are others.
  static void store(Bf16* p, F x) {
    store_rounded(p, x, uadd(uand(down<16>(bits(x)), uset(1)), uset(0x7fff)));
  }
  static void store(F16* p, F x) { put(p, svreinterpret_u32_f16(svcvt_f16_f32_x(all(), x))); }
  // Plain stores: processors notice by themselves that whole lines are written one after another.
  template <class T>
  static void stream(T* p, F x, F y) {
    store(p, x);
    store(p + width, y);
  }
  static void fence() {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return svsqrt_f32_x(all(), a); }
  static constexpr int doubles = 2;
  // A conversion reads and writes the lower half of a double's place.
  static void widen(F x, D* d) {
    d[0] = svcvt_f64_f32_x(all(), svreinterpret_f32_u64(svunpklo_u64(bits(x))));
    d[1] = svcvt_f64_f32_x(all(), svreinterpret_f32_u64(svunpkhi_u64(bits(x))));
  }
  static D dadd(D a, D b) { return a + b; }
  static D dmul(D a, D b) { return a * b; }
  static D dset(double x) { return svdup_n_f64(x); }
  static F narrow(const D* d) {
    return svuzp1_f32(svcvt_f32_f64_x(all(), d[0]), svcvt_f32_f64_x(all(), d[1]));
  }
  static void dstore(double* p, D a) { svst1_f64(all(), p, a); }
  static F sign(F x, F size) {
    U bit = uset(0x80000000u), sized = uxor(bits(size), uand(bits(x), bit));
    return floats(svsel_u32(svacgt_n_f32(all(), x, 0.0f), sized, uand(bits(size), bit)));
  }
  static U uset(uint32_t x) { return svdup_n_u32(x); }
  static U count() { return svindex_u32(0, 1); }
  static U uadd(U a, U b) { return a + b; }
  static U umul(U a, U b) { return a * b; }
  static U uxor(U a, U b) { return a ^ b; }
  template <int n>
  static U down(U a) {
    return a >> n;
  }
  template <int n>
  static U up(U a) {
    return a << n;
  }
  static U low16(U a) { return uand(a, uset(0xffffu)); }
  static U uand(U a, U b) { return a & b; }
  static U uor(U a, U b) { return a | b; }
  static U usub(U a, U b) { return a - b; }
  static U imin(U a, U b) { return svreinterpret_u32_s32(svmin_s32_x(all(), number(a), number(b))); }
  static U imax(U a, U b) { return svreinterpret_u32_s32(svmax_s32_x(all(), number(a), number(b))); }
  static U where_not_zero(U a, U b) { return svsel_u32(svcmpne_n_u32(all(), a, 0), b, uset(0)); }
  static U bits(F x) { return svreinterpret_u32_f32(x); }
  static F floats(U a) { return svreinterpret_f32_u32(a); }
  static void ustore(uint32_t* p, U a) { svst1_u32(all(), p, a); }
  static U load_codes(const uint8_t* p) { return svld1ub_u32(all(), p); }
  static void store_codes(uint8_t* p, U a) { svst1b_u32(all(), p, a); }
  static void store_upper(uint16_t* p, U a) { put(p, down<16>(a)); }
  static void store_rounded(float* p, F x, U) { store(p, x); }
  static void store_rounded(Bf16* p, F x, U below) {
    put(p, down<16>(svsel_u32(svcmpuo_f32(all(), x, x), uset(~0u), uadd(bits(x), below))));
  }

 private:
  static svbool_t all() { return svptrue_b8(); }
  static svint32_t number(U a) { return svreinterpret_s32_u32(a); }
  static U half(const void* p) { return svld1uh_u32(all(), static_cast<const uint16_t*>(p)); }
  static void put(void* p, U x) { svst1h_u32(all(), static_cast<uint16_t*>(p), x); }
};

#include "adam_lane.inl"

constexpr const char* kName = INFINITY_SVE_BITS == 256 ? "sve256" : "sve512";
const Kernels kKernels = {kName,          update_any,  traffic_any,      sum_any,
                          accumulate_any, convert_any, INFINITY_SVE_BITS};
constexpr const Kernels* kFound = &kKernels;

}  // namespace
}  // namespace sve
}  // namespace infinity
#else
namespace infinity {
namespace sve {
constexpr const Kernels* kFound = nullptr;
}  // namespace sve
}  // namespace infinity
#endif
