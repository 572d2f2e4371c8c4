// The maths, once. adam_{scalar,avx2,avx512,neon}.cpp and adam_sve.inl include this file in a namespace
// of their own after they have defined `Vector`: `width` floats side by side, with the operations used below.
//
// [Note: one rounding per operation] Every operation of the update rounds once, in the order
// written in `step()` below: no fma intrinsic, no contraction (-ffp-contract=off), no
// approximation, subnormals kept. So the scalar, AVX2, AVX-512, NEON and SVE lanes give the same bits,
// and so do plain torch operations on any device (`adamw_reference` in hardware/cpu_adam.py is the
// same sequence; change both or none). Per element, each line one rounding:
//
//     g  = float(grad)                   exact
//     g  = g * grad_scale                negative to maximize
//     g  = float(double(g) + double(p) * double(l2))     only with weight decay that is not
//                                        decoupled; the product is exact
//     p  = p * decay                     decay = 1 - lr * weight_decay; only if decoupled
//
// then, with AdamW and Adam (rules.h has the others)
//
//     m  = m + ((g - m) * lerp)          three; lerp = 1 - beta1, if that is below 0.5 (torch's lerp),
//     m  = g + ((g - m) * lerp)          else lerp = -(1 - (1 - beta1))
//     v  = (v * beta2) + ((g * square) * g)      square = 1 - beta2
//     d  = (sqrt(v) * inverse_root) + eps        inverse_root = 1 / sqrt(1 - beta2^step)
//     p  = p + ((m * step_size) / d)             step_size = -lr / (1 - beta1^step)
//     out = cast(p)                      to nearest, ties to even
//
// The weight decay that is added to the gradient goes through double because torch's CPU has an
// fma there, and where the two cancel an update of size lr hangs on that rounding.
//
// The scalars are computed in double and rounded to float once (`derive`). This is torch's
// single-tensor AdamW and Adam, but for a multiplication by 1/sqrt(1 - beta2^step) where torch's
// CPU divides: torch on CUDA turns a division by a scalar into that multiplication anyway, and
// only a multiplication is one rounding on both.
//
// Nothing in here may call a library template: a function that the linker could share with
// another file would carry this file's instruction set with it. Hence `static` everywhere.

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct Log8 {  // [Note: moments in 8 bits]
  uint8_t code;
};

// ---- one element: the tail of every vector loop, and the whole of the scalar kernel ----

template <class T>
static inline T read_as(const void* address) {
  T value;
  __builtin_memcpy(&value, address, sizeof value);
  return value;
}
static inline float as_float(uint32_t bits) { return read_as<float>(&bits); }
static inline uint32_t as_bits(float value) { return read_as<uint32_t>(&value); }

static inline uint16_t to_bf16(float value) {
  uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffff;  // torch's NaN, on x86
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float from_f16(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
  if (exponent == 0x1f) {
    uint32_t quiet = fraction ? 0x400000u : 0u;
    return as_float(sign | 0x7f800000u | quiet | (fraction << 13));
  }
  if (exponent) return as_float(sign | ((exponent + 112) << 23) | (fraction << 13));
  if (!fraction) return as_float(sign);
  int shift = __builtin_clz(fraction) - 21;  // brings the leading bit to bit 10
  return as_float(sign | (static_cast<uint32_t>(113 - shift) << 23) |
                  ((fraction << (shift + 13)) & 0x7fffffu));
}

static inline uint16_t to_f16(float value) {
  uint32_t bits = as_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x33000000u) return static_cast<uint16_t>(sign);             // below half of the smallest
  uint32_t exponent = magnitude >> 23, kept, rest, half;
  if (exponent >= 113) {
    kept = (magnitude - (112u << 23)) >> 13;
    rest = magnitude & 0x1fffu;
    half = 0x1000u;
  } else {  // a subnormal half: the fraction, with its leading bit, in units of 2^-24
    uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u, shift = 126 - exponent;
    kept = fraction >> shift;
    rest = fraction & ((1u << shift) - 1);
    half = 1u << (shift - 1);
  }
  kept += rest > half || (rest == half && (kept & 1u));
  return static_cast<uint16_t>(sign | kept);
}

struct One {
  static constexpr int width = 1;
  using F = float;
  using D = double;
  static F set(float x) { return x; }
  static F load(const float* p) { return read_as<float>(p); }
  static F load(const Bf16* p) { return as_float(static_cast<uint32_t>(read_as<uint16_t>(p)) << 16); }
  static F load(const F16* p) { return from_f16(read_as<uint16_t>(p)); }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  static void store(Bf16* p, F x) {
    uint16_t bits = to_bf16(x);
    __builtin_memcpy(p, &bits, sizeof bits);
  }
  static void store(F16* p, F x) {
    uint16_t bits = to_f16(x);
    __builtin_memcpy(p, &bits, sizeof bits);
  }
  template <class T>
  static void stream(T* p, F x, F y) {  // only vectors can pass the caches
    store(p, x);
    store(p + 1, y);
  }
  static void fence() {}
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return __builtin_sqrtf(a); }
  static constexpr int doubles = 1;  // D's that hold one F
  static void widen(F x, D* d) { d[0] = static_cast<double>(x); }
  static D dadd(D a, D b) { return a + b; }
  static D dmul(D a, D b) { return a * b; }
  static D dset(double x) { return x; }
  static F narrow(const D* d) { return static_cast<float>(d[0]); }
  static void dstore(double* p, D a) { *p = a; }
  // `size` times torch's sign of x: where x is 0 or NaN, 0 with the sign of `size`.
  static F sign(F x, F size) { return x > 0.0f ? size : x < 0.0f ? -size : __builtin_copysignf(0.0f, size); }
  using U = uint32_t;
  static U uset(uint32_t x) { return x; }
  static U count() { return 0; }
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
  static U low16(U a) { return a & 0xffffu; }
  static U uand(U a, U b) { return a & b; }
  static U uor(U a, U b) { return a | b; }
  static U usub(U a, U b) { return a - b; }
  // Of numbers with a sign.
  static U imin(U a, U b) { return static_cast<int32_t>(a) < static_cast<int32_t>(b) ? a : b; }
  static U imax(U a, U b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? a : b; }
  static U where_not_zero(U a, U b) { return a ? b : 0u; }
  static U bits(F x) { return as_bits(x); }
  static F floats(U a) { return as_float(a); }
  static void ustore(uint32_t* p, U a) { *p = a; }
  static U load_codes(const uint8_t* p) { return *p; }
  static void store_codes(uint8_t* p, U a) { *p = static_cast<uint8_t>(a); }
  static void store_upper(uint16_t* p, U a) {
    uint16_t upper = static_cast<uint16_t>(a >> 16);
    __builtin_memcpy(p, &upper, sizeof upper);
  }
  static void store_rounded(float* p, F x, U) { store(p, x); }
  static void store_rounded(Bf16* p, F x, U below) {
    uint32_t bits = as_bits(x);
    bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0xffffffffu : bits + below;
    uint16_t kept = static_cast<uint16_t>(bits >> 16);
    __builtin_memcpy(p, &kept, sizeof kept);
  }
};

struct Nothing {};  // the type of an absent `out`

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// ---- the update ----

// [Note: stochastic rounding] A moment in bf16 is rounded up or down at random, by adding 16 random bits
// below its last place and cutting them off: the mean of the error is zero. To nearest, exp_avg_sq could not
// decay, because beta2 changes it by less than half a place. What overflows becomes Inf, as in fp32 a little
// later. The bits are a hash (lowbias32, of Chris Wellons' hash prospector) of the element's index within its
// parameter and of a key, which stands for the parameter and the step. So they do not depend on where a chunk
// begins, and no generator has a state. The first moment takes the lower 16 bits, the second the upper.
template <class L>
static inline typename L::U hashed(typename L::U x) {
  x = L::umul(L::uxor(x, L::template down<16>(x)), L::uset(0x7feb352du));
  x = L::umul(L::uxor(x, L::template down<15>(x)), L::uset(0x846ca68bu));
  return L::uxor(x, L::template down<16>(x));
}

template <class L>
struct Constants {
  typename L::F grad_scale, decay, x[6];
  typename L::D l2;
  typename L::U key;
  uint32_t offset;            // from an index within the chunk to one within the parameter
  bool with_l2, flag, moves;  // moves: of SGD, whether it has a momentum
  Constants(const Scalars& s, int64_t begin)
      : grad_scale(L::set(s.grad_scale)),
        decay(L::set(s.decay)),
        l2(L::dset(static_cast<double>(s.l2))),
        key(L::uset(s.key ^ hashed<One>(s.upper))),
        offset(s.first - static_cast<uint32_t>(begin)),
        with_l2(s.l2 != 0.0f),
        flag(s.flag),
        moves(s.x[1] != 0.0f) {
    for (int k = 0; k < 6; ++k) x[k] = L::set(s.x[k]);
  }
};

template <class L>
static inline typename L::F add_l2(typename L::F g, typename L::F p, typename L::D l2) {
  typename L::D gd[L::doubles], pd[L::doubles];
  L::widen(g, gd);
  L::widen(p, pd);
  for (int k = 0; k < L::doubles; ++k) gd[k] = L::dadd(gd[k], L::dmul(pd[k], l2));
  return L::narrow(gd);
}

struct Whole {  // a master in fp32
  float* p;
  template <class L>
  typename L::F load(int64_t i) const {
    return L::load(p + i);
  }
  template <class L>
  void store(int64_t i, typename L::F x) const {
    L::store(p + i, x);
  }
};

// [Note: a split master] A master in two halves: the bf16 copy, and the lower 16 bits, `low`. The copy is the
// master to nearest, ties away from zero, so that `low` tells which way it was rounded: below half a place it
// was down, and the upper half is the copy; else it was up, and the upper half is one less. That is exact for
// all values but NaNs, which become one first. An edit of the copy leaves `low` as it is, and the master is
// within half a place of the edit; where the two would be a NaN (an edit to zero or to Inf), it is the edit.
struct Halves {
  uint16_t* low;
  Bf16* copy;
  template <class L>
  static typename L::U above_inf(typename L::U bits) {  // not 0: a NaN
    const typename L::U inf = L::uset(0x7f800000u);
    return L::usub(L::imax(L::uand(bits, L::uset(0x7fffffffu)), inf), inf);
  }
  template <class L>
  typename L::F load(int64_t i) const {
    typename L::U upper = L::bits(L::load(copy + i)),
                  lower = L::bits(L::load(reinterpret_cast<Bf16*>(low) + i));
    typename L::U up = L::template up<16>(L::template down<31>(lower));
    typename L::U bits = L::uor(L::usub(upper, up), L::template down<16>(lower));
    return L::floats(L::uxor(bits, L::where_not_zero(above_inf<L>(bits), L::uxor(bits, upper))));
  }
  template <class L>
  void store(int64_t i, typename L::F x) const {
    typename L::U bits = L::bits(x), nan = L::uxor(bits, L::uset(0x7fc00000u));
    bits = L::uxor(bits, L::where_not_zero(above_inf<L>(bits), nan));
    L::store_upper(reinterpret_cast<uint16_t*>(copy) + i, L::uadd(bits, L::uset(0x8000u)));
    L::store_upper(low + i, L::template up<16>(bits));
  }
};

// [Note: one rounding per operation]. A multiplication by exactly 1 changes nothing, so `decay`
// and `grad_scale` need no branch; `l2` does (0 * Inf is NaN).
template <class L, class R, class Master, class Grad>
static inline typename L::F step_of(const Master& master, typename L::F* m, const Grad* grad, int64_t i,
                                    const Constants<L>& c) {
  typename L::F p = master.template load<L>(i);
  typename L::F g = L::mul(L::load(grad + i), c.grad_scale);
  if (c.with_l2) g = add_l2<L>(g, p, c.l2);
  p = L::mul(p, c.decay);
  R::template apply<L>(p, m, g, c);
  master.template store<L>(i, p);
  return p;
}

template <class L>
static inline typename L::U random_at(int64_t i, const Constants<L>& c) {
  return hashed<L>(L::uxor(L::uadd(L::uset(c.offset + static_cast<uint32_t>(i)), L::count()), c.key));
}

template <class L, class R, class Master, class Moment, class Grad>
static inline typename L::F step(const Master& master, Moment* const* moments, const Grad* grad, int64_t i,
                                 const Constants<L>& c) {
  typename L::F m[R::moments + 1];
  for (int k = 0; k < R::moments; ++k) m[k] = L::load(moments[k] + i);
  typename L::F p = step_of<L, R>(master, m, grad, i, c);
  typename L::U random{};
  if constexpr (!Same<Moment, float>::value && R::moments > 0) random = random_at<L>(i, c);
  if constexpr (R::moments > 0) L::store_rounded(moments[0] + i, m[0], L::low16(random));
  if constexpr (R::moments > 1) L::store_rounded(moments[1] + i, m[1], L::template down<16>(random));
  return p;
}

// [Note: moments in 8 bits] A code is the upper bits of a float: its exponent and three bits of its fraction,
// counted from the scale of the block, a float of such bits alone, so that the largest of a block has one of
// the last codes. So it is a logarithm, eight codes for a factor of two. A block is kBlock elements of one
// parameter. Code 0 is the value 0. A sign takes the upper bit of a code, and leaves a range of 2^16 below
// the largest; sums of squares have none, and a range of 2^32, of which a root makes the same. Each block is
// read, updated and coded anew from its new largest, with stochastic rounding: 16 random bits are added below
// the last place. What is below the range becomes 0; but a sum of squares that is not 0 becomes code 1 at
// least, because a quotient by its root would explode. What overflows becomes Inf, and one Inf or NaN takes
// the others of its block out of the range.
constexpr uint32_t kNaN = 0x7fc00000u;
constexpr int kCodeAt = 20;  // the place of a code in the bits of a float

template <class L, bool squares>
static inline typename L::F decoded(const uint8_t* codes, uint32_t scale) {
  typename L::U code = L::load_codes(codes), size = squares ? code : L::uand(code, L::uset(127u));
  typename L::U bits = L::where_not_zero(size, L::uadd(L::template up<kCodeAt>(size), L::uset(scale)));
  if (!squares) bits = L::uor(bits, L::template up<24>(L::uand(code, L::uset(128u))));
  return L::floats(bits);
}

template <class L>
static inline typename L::U magnitude(typename L::F x) {
  return L::imin(L::uand(L::bits(x), L::uset(0x7fffffffu)), L::uset(kNaN));
}

template <class L, bool squares>
static inline typename L::U encoded(typename L::F x, typename L::U random, uint32_t scale) {
  typename L::U size = magnitude<L>(x);
  typename L::U code = L::template down<kCodeAt>(L::uadd(size, L::template up<kCodeAt - 16>(random)));
  code = L::imax(L::usub(code, L::uset(scale >> kCodeAt)), L::uset(0u));
  if (squares) return L::imax(code, L::imin(size, L::uset(1u)));
  return L::uor(code, L::uand(L::template down<24>(L::bits(x)), L::uset(128u)));
}

// Calls each(lane, k) for the elements of a block, of which there are `numel`: whole lanes, then single ones.
template <class Each>
static inline void in_block(int64_t numel, Each each) {
  int64_t k = 0;
  for (; k + Vector::width <= numel; k += Vector::width) each(Vector(), k);
  for (; k < numel; ++k) each(One(), k);
}

template <bool squares>
static inline uint32_t scale_of(const float* values, int64_t numel) {
  typename Vector::U most = Vector::uset(0u);
  uint32_t largest = 0, lanes[Vector::width];
  in_block(numel, [&](auto lane, int64_t k) {
    using L = decltype(lane);
    if constexpr (L::width == Vector::width) most = L::imax(most, magnitude<L>(L::load(values + k)));
    else largest = L::imax(largest, magnitude<L>(L::load(values + k)));
  });
  Vector::ustore(lanes, most);
  for (uint32_t each : lanes) largest = One::imax(largest, each);
  const uint32_t top = (largest + (1u << kCodeAt) - 1) >> kCodeAt, codes = squares ? 255 : 127;
  return top > codes ? (top - codes) << kCodeAt : 0u;
}

// What `measure` does instead: nothing is computed, values change places so that no store is dead.
template <class L, class Moment, class Grad>
static inline typename L::F move(float* master, Moment* const* moments, const Grad* grad, int64_t i) {
  typename L::F p = L::load(master + i), m = L::load(moments[0] + i), v = L::load(moments[1] + i);
  L::store(master + i, m);
  L::store_rounded(moments[0] + i, v, L::uset(0));
  L::store_rounded(moments[1] + i, p, L::uset(0));
  return L::load(grad + i);
}

#ifndef INFINITY_AHEAD
#define INFINITY_AHEAD 512
#endif
constexpr int64_t kAhead = INFINITY_AHEAD;  // elements that are asked for ahead of use

// Asks for the lines that hold elements [i, i + n) of one array.
template <int n, class T>
static inline void prefetch(const T* p, int64_t i) {
  constexpr int line = 64 / sizeof(T);
  for (int k = 0; k < n; k += line) __builtin_prefetch(p + i + k, 1, 3);
}

// Calls each(lane, grad, i) for every element of [begin, end) and puts what it returns to `out`:
// whole lanes, then a scalar tail. Past the caches: a scalar head up to where `out` is aligned,
// then two lanes at a time.
template <int count, class Moment, class Grad, class Out, class Each>
static inline void sweep(const Buffers& b, Moment* const* moments, int64_t begin, int64_t end, bool stream,
                         Each each) {
  constexpr bool with_out = !Same<Out, Nothing>::value;
  constexpr int two = 2 * Vector::width;
  const Grad* grad = static_cast<const Grad*>(b.grad);
  [[maybe_unused]] Out* out = static_cast<Out*>(b.out);
  int64_t i = begin;
  if constexpr (with_out) {
    if (stream) {
      constexpr uintptr_t mask = (two * sizeof(Out) < 64 ? two * sizeof(Out) : 64) - 1;
      for (; i < end && (reinterpret_cast<uintptr_t>(out + i) & mask); ++i)
        One::store(out + i, each(One(), grad, i));
      for (; i + two <= end; i += two) {
        prefetch<two>(b.master, i + kAhead);
        for (int k = 0; k < count; ++k) prefetch<two>(moments[k], i + kAhead);
        prefetch<two>(grad, i + kAhead);
        typename Vector::F x = each(Vector(), grad, i), y = each(Vector(), grad, i + Vector::width);
        Vector::stream(out + i, x, y);
      }
    }
  }
  for (; i + Vector::width <= end; i += Vector::width) {
    typename Vector::F x = each(Vector(), grad, i);
    if constexpr (with_out) Vector::store(out + i, x);
  }
  for (; i < end; ++i) {
    float x = each(One(), grad, i);
    if constexpr (with_out) One::store(out + i, x);
  }
}

// The constants for one element, or for a vector.
struct BothConstants {
  const Constants<Vector> wide;
  const Constants<One> narrow;
  BothConstants(const Scalars& s, int64_t begin) : wide(s, begin), narrow(s, begin) {}
  template <class L>
  const Constants<L>& of() const {
    if constexpr (L::width == 1) return narrow;
    else return wide;
  }
};

// [Note: moments in 8 bits]. `begin` is the first element of a block.
template <class R, class Master, class Grad, class Out>
static void update_coded(const Buffers& b, const Master& master, int64_t begin, int64_t end, const Scalars& s,
                         bool stream) {
  const BothConstants c(s, begin);
  uint8_t* const codes[2] = {static_cast<uint8_t*>(b.moments[0]), static_cast<uint8_t*>(b.moments[1])};
  float values[2][kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t next = at + kBlock < end ? at + kBlock : end, block = at / kBlock;
    uint32_t scales[2] = {};
    for (int k = 0; k < R::moments; ++k) {
      scales[k] = b.scales[k][block];
      prefetch<kBlock>(codes[k], at + 2 * kAhead);
    }
    sweep<0, uint8_t, Grad, Out>(b, codes, at, next, stream, [&](auto lane, const Grad* grad, int64_t i) {
      using L = decltype(lane);
      typename L::F m[R::moments + 1];
      if constexpr (R::moments > 0) m[0] = decoded<L, R::squares[0]>(codes[0] + i, scales[0]);
      if constexpr (R::moments > 1) m[1] = decoded<L, R::squares[1]>(codes[1] + i, scales[1]);
      typename L::F p = step_of<L, R>(master, m, grad, i, c.of<L>());
      for (int k = 0; k < R::moments; ++k) L::store(values[k] + (i - at), m[k]);
      return p;
    });
    if constexpr (R::moments > 0)
      b.scales[0][block] = scales[0] = scale_of<R::squares[0]>(values[0], next - at);
    if constexpr (R::moments > 1)
      b.scales[1][block] = scales[1] = scale_of<R::squares[1]>(values[1], next - at);
    in_block(R::moments ? next - at : 0, [&](auto lane, int64_t k) {
      using L = decltype(lane);
      typename L::U random = random_at<L>(at + k, c.of<L>());
      if constexpr (R::moments > 0)
        L::store_codes(codes[0] + at + k,
                       encoded<L, R::squares[0]>(L::load(values[0] + k), L::low16(random), scales[0]));
      if constexpr (R::moments > 1)
        L::store_codes(codes[1] + at + k, encoded<L, R::squares[1]>(L::load(values[1] + k),
                                                                    L::template down<16>(random), scales[1]));
    });
  }
}

template <class R, class Master, class Moment, class Grad, class Out>
static void update_typed(const Buffers& b, const Master& master, int64_t begin, int64_t end, const Scalars& s,
                         bool stream) {
  const BothConstants c(s, begin);
  Moment* const moments[2] = {static_cast<Moment*>(b.moments[0]), static_cast<Moment*>(b.moments[1])};
  sweep<R::moments, Moment, Grad, Out>(b, moments, begin, end, stream,
                                       [&](auto lane, const Grad* grad, int64_t i) {
                                         using L = decltype(lane);
                                         return step<L, R>(master, moments, grad, i, c.of<L>());
                                       });
}

template <class Moment, class Grad, class Out>
static void traffic_typed(const Buffers& b, int64_t begin, int64_t end, bool stream) {
  Moment* const moments[2] = {static_cast<Moment*>(b.moments[0]), static_cast<Moment*>(b.moments[1])};
  sweep<2, Moment, Grad, Out>(b, moments, begin, end, stream, [&](auto lane, const Grad* grad, int64_t i) {
    return move<decltype(lane)>(b.master, moments, grad, i);
  });
}

// ---- sums of squares ----

// [Note: the halving tree] A span is 4096 rows of 16 elements, zeros after its end. Rows are added
// in halves (the tree over rows: first half + second half, down to single rows), then the 16
// columns: c[i] + c[i+8], c[i] + c[i+4], c[i] + c[i+2], c[0] + c[1]. Squares are exact in double.
// Squares are not negative, so an addition of 0 changes nothing and empty halves are not added.
constexpr int kColumns = 16;
constexpr int kLeaf = 8;  // rows of the part of the tree that is unrolled

template <class L>
struct Row {
  static constexpr int count = kColumns * L::doubles / L::width;
  typename L::D d[count];
};

template <class L, int rows, class T>
static inline Row<L> sum_leaf(const T* p) {
  Row<L> sum;
  if constexpr (rows == 1) {
    for (int k = 0; k < kColumns / L::width; ++k) L::widen(L::load(p + k * L::width), sum.d + k * L::doubles);
    for (int k = 0; k < Row<L>::count; ++k) sum.d[k] = L::dmul(sum.d[k], sum.d[k]);
  } else {
    sum = sum_leaf<L, rows / 2>(p);
    Row<L> second = sum_leaf<L, rows / 2>(p + kColumns * (rows / 2));
    for (int k = 0; k < Row<L>::count; ++k) sum.d[k] = L::dadd(sum.d[k], second.d[k]);
  }
  return sum;
}

// Sums `rows` rows (a power of two, at least kLeaf) of which `numel` elements exist, 1 or more.
template <class L, class T>
static Row<L> sum_rows(const T* p, int64_t rows, int64_t numel) {
  if (rows == kLeaf) {
    if (numel >= kLeaf * kColumns) return sum_leaf<L, kLeaf>(p);
    T padded[kLeaf * kColumns] = {};
    __builtin_memcpy(padded, p, static_cast<unsigned long>(numel) * sizeof(T));
    return sum_leaf<L, kLeaf>(static_cast<const T*>(padded));
  }
  int64_t half = rows / 2 * kColumns;
  Row<L> sum = sum_rows<L>(p, rows / 2, numel < half ? numel : half);
  if (numel > half) {
    Row<L> second = sum_rows<L>(p + half, rows / 2, numel - half);
    for (int k = 0; k < Row<L>::count; ++k) sum.d[k] = L::dadd(sum.d[k], second.d[k]);
  }
  return sum;
}

template <class T>
static double sum_typed(const T* p, int64_t numel) {
  if (numel <= 0) return 0.0;
  Row<Vector> row = sum_rows<Vector>(p, kSpan / kColumns, numel);
  double c[kColumns];
  for (int k = 0; k < Row<Vector>::count; ++k)
    Vector::dstore(c + k * (kColumns / Row<Vector>::count), row.d[k]);
  for (int half = kColumns / 2; half; half /= 2)
    for (int k = 0; k < half; ++k) c[k] = c[k] + c[k + half];
  return c[0];
}

// ---- accumulate, convert ----

template <class T>
static void accumulate_typed(float* target, const T* source, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + Vector::width <= end; i += Vector::width)
    Vector::store(target + i, Vector::add(Vector::load(target + i), Vector::load(source + i)));
  for (; i < end; ++i) One::store(target + i, One::add(One::load(target + i), One::load(source + i)));
}

template <class To, class From>
static void convert_typed(To* target, const From* source, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + Vector::width <= end; i += Vector::width) Vector::store(target + i, Vector::load(source + i));
  for (; i < end; ++i) One::store(target + i, One::load(source + i));
}

// ---- from dtypes to types ----

// Calls each(T*) for the type of `dtype`.
template <class Each>
static inline void with_type(Dtype dtype, const void* p, Each each) {
  switch (dtype) {
    case Dtype::f32:
      return each(static_cast<const float*>(p));
    case Dtype::bf16:
      return each(static_cast<const Bf16*>(p));
    case Dtype::f16:
      return each(static_cast<const F16*>(p));
    case Dtype::none:
    case Dtype::log8:
      return;
  }
}

template <class T>
struct Pointee;
template <class T>
struct Pointee<const T*> {
  using type = T;
};

template <class T>
struct Plain;
template <class T>
struct Plain<const T&> {
  using type = T;
};
template <class T>
using Bare = typename Plain<T>::type;

// Calls each(moment, grad, out), pointers that say which types these have.
template <class Each>
static inline void with_buffers(const Buffers& b, Each each) {
  with_type(b.grad_dtype, b.grad, [&](auto* grad) {
    auto with_out = [&](auto* out) {
      if (b.moment_dtype == Dtype::log8) each(static_cast<const Log8*>(nullptr), grad, out);
      else if (b.moment_dtype == Dtype::bf16) each(static_cast<const Bf16*>(nullptr), grad, out);
      else each(static_cast<const float*>(nullptr), grad, out);
    };
    if (b.out_dtype == Dtype::none) return with_out(static_cast<const Nothing*>(nullptr));
    with_type(b.out_dtype, b.out, with_out);
  });
}

template <class R>
static void update_by(const Buffers& b, int64_t begin, int64_t end, const Scalars& s, bool stream) {
  with_buffers(b, [&](auto* moment, auto* grad, auto* out) {
    using Moment = typename Pointee<decltype(moment)>::type;
    using Grad = typename Pointee<decltype(grad)>::type;
    using Out = typename Pointee<decltype(out)>::type;
    auto by = [&](const auto& master, auto written) {
      using Master = Bare<decltype(master)>;
      using Written = decltype(written);
      if constexpr (Same<Moment, Log8>::value)
        update_coded<R, Master, Grad, Written>(b, master, begin, end, s, stream);
      else update_typed<R, Master, Moment, Grad, Written>(b, master, begin, end, s, stream);
    };
    if (!b.low) return by(Whole{b.master}, Out());
    if constexpr (Same<Out, Bf16>::value)  // the copy is a half of the master
      by(Halves{b.low, static_cast<Bf16*>(b.out)}, Nothing());
  });
  if (stream) Vector::fence();
}

static void update_any(const Buffers& b, int64_t begin, int64_t end, const Scalars& s, bool stream) {
  switch (b.rule) {
#define INFINITY_UPDATE(name, type) \
  case Rule::name:                  \
    return update_by<type>(b, begin, end, s, stream);
    INFINITY_RULES(INFINITY_UPDATE)
#undef INFINITY_UPDATE
  }
}

static void traffic_any(const Buffers& b, int64_t begin, int64_t end, bool stream) {
  with_buffers(b, [&](auto* moment, auto* grad, auto* out) {
    using Moment = typename Pointee<decltype(moment)>::type;
    if constexpr (!Same<Moment, Log8>::value)  // nobody measures these
      traffic_typed<Moment, typename Pointee<decltype(grad)>::type, typename Pointee<decltype(out)>::type>(
          b, begin, end, stream);
  });
  if (stream) Vector::fence();
}

static double sum_any(const void* source, Dtype dtype, int64_t begin, int64_t numel) {
  double sum = 0.0;
  with_type(dtype, source, [&](auto* p) { sum = sum_typed(p + begin, numel); });
  return sum;
}

static void accumulate_any(float* target, const void* source, Dtype dtype, int64_t begin, int64_t end) {
  with_type(dtype, source, [&](auto* p) { accumulate_typed(target, p, begin, end); });
}

static void convert_any(void* target, Dtype to, const void* source, Dtype from, int64_t begin, int64_t end) {
  with_type(from, source, [&](auto* p) {
    with_type(to, target, [&](auto* q) {
      convert_typed(const_cast<typename Pointee<decltype(q)>::type*>(q), p, begin, end);
    });
  });
}
