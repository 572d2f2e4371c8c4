// infinity._cpu_adam: addresses and counts in, nothing out. The checks that need tensors are in
// hardware/cpu_adam.py. Every function drops the GIL while it works.

#include <pybind11/pybind11.h>

#include <cstring>
#include <string>
#include <vector>

#include "adam.h"

namespace py = pybind11;
using namespace infinity;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Buffers buffers(int rule, uintptr_t master, bool split, uintptr_t first, uintptr_t second,
                uintptr_t first_scales, uintptr_t second_scales, int moment_dtype, uintptr_t grad,
                int grad_dtype, uintptr_t out, int out_dtype) {
  return {split ? nullptr : at<float>(master),
          {at<void>(first), at<void>(second)},
          at<void>(grad),
          at<void>(out),
          static_cast<Dtype>(moment_dtype),
          static_cast<Dtype>(grad_dtype),
          static_cast<Dtype>(out_dtype),
          static_cast<Rule>(rule),
          {at<uint32_t>(first_scales), at<uint32_t>(second_scales)},
          split ? at<uint16_t>(master) : nullptr};
}

// The segments, unpacked; throws ValueError for the first one that is wrong.
std::vector<Segment> unpacked(int rule, const py::bytes& packed, int64_t numel) {
  char* data = nullptr;
  Py_ssize_t nbytes = 0;
  if (PyBytes_AsStringAndSize(packed.ptr(), &data, &nbytes)) throw py::error_already_set();
  if (static_cast<size_t>(nbytes) % sizeof(Segment)) throw py::value_error("segments are 88 bytes each");
  std::vector<Segment> segments(static_cast<size_t>(nbytes) / sizeof(Segment));
  if (nbytes) std::memcpy(segments.data(), data, static_cast<size_t>(nbytes));
  int64_t index = 0;
  if (const char* wrong = check(static_cast<Rule>(rule), segments.data(),
                                static_cast<int64_t>(segments.size()), numel, &index))
    throw py::value_error("segment " + std::to_string(index) + " " + wrong);
  return segments;
}

void py_update(int rule, uintptr_t master, bool split, uintptr_t first, uintptr_t second,
               uintptr_t first_scales, uintptr_t second_scales, int moment_dtype, uintptr_t grad,
               int grad_dtype, uintptr_t out, int out_dtype, int64_t numel, const py::bytes& packed) {
  std::vector<Segment> segments = unpacked(rule, packed, numel);
  Buffers b = buffers(rule, master, split, first, second, first_scales, second_scales, moment_dtype, grad,
                      grad_dtype, out, out_dtype);
  py::gil_scoped_release release;
  update(b, segments.data(), static_cast<int64_t>(segments.size()));
}

py::tuple py_derive(int rule, const py::bytes& packed) {
  std::vector<Segment> segments = unpacked(rule, packed, INT64_MAX);
  if (segments.size() != 1) throw py::value_error("one segment is derived at a time");
  Scalars s = derive(static_cast<Rule>(rule), segments[0]);
  return py::make_tuple(s.grad_scale, s.decay, s.l2, s.x[0], s.x[1], s.x[2], s.x[3], s.x[4], s.x[5], s.flag);
}

}  // namespace

PYBIND11_MODULE(_cpu_adam, m) {
  using py::arg;
  m.attr("SEGMENT_NBYTES") = sizeof(Segment);
  m.attr("SPAN") = kSpan;
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("use_isa", [](const std::string& name) { return use_isa(name.c_str()); }, arg("name"));
  m.def("available_isas", [] {
    const char* names[3];
    int count = available_isas(names);
    py::list found;
    for (int i = 0; i < count; ++i) found.append(names[i]);
    return found;
  });
  m.def("threads", &threads);
  m.def("set_threads", &set_threads, arg("count"));
  m.def("derive", &py_derive, arg("rule"), arg("segment"));
  m.def("update", &py_update, arg("rule"), arg("master"), arg("split"), arg("first"), arg("second"),
        arg("first_scales"), arg("second_scales"), arg("moment_dtype"), arg("grad"), arg("grad_dtype"),
        arg("out"), arg("out_dtype"), arg("numel"), arg("segments"));
  m.def(
      "measure",
      [](uintptr_t master, uintptr_t first, uintptr_t second, int moment_dtype, uintptr_t grad,
         int grad_dtype, uintptr_t out, int out_dtype, int64_t numel, bool stream) {
        py::gil_scoped_release release;
        measure(
            buffers(0, master, false, first, second, 0, 0, moment_dtype, grad, grad_dtype, out, out_dtype),
            numel, stream);
      },
      arg("master"), arg("first"), arg("second"), arg("moment_dtype"), arg("grad"), arg("grad_dtype"),
      arg("out"), arg("out_dtype"), arg("numel"), arg("stream"));
  m.def(
      "sum_of_squares",
      [](uintptr_t source, int dtype, uintptr_t pieces, int64_t count, uintptr_t sums) {
        py::gil_scoped_release release;
        sum_of_squares(at<void>(source), static_cast<Dtype>(dtype), at<Piece>(pieces), count,
                       at<double>(sums));
      },
      arg("source"), arg("dtype"), arg("pieces"), arg("count"), arg("sums"));
  m.def(
      "accumulate",
      [](uintptr_t target, uintptr_t source, int dtype, int64_t numel) {
        py::gil_scoped_release release;
        accumulate(at<float>(target), at<void>(source), static_cast<Dtype>(dtype), numel);
      },
      arg("target"), arg("source"), arg("dtype"), arg("numel"));
  m.def(
      "convert",
      [](uintptr_t target, int to, uintptr_t source, int from, int64_t numel) {
        py::gil_scoped_release release;
        convert(at<void>(target), static_cast<Dtype>(to), at<void>(source), static_cast<Dtype>(from), numel);
      },
      arg("target"), arg("to"), arg("source"), arg("source_dtype"), arg("numel"));
  m.def(
      "copy_bytes",
      [](uintptr_t target, uintptr_t source, int64_t nbytes) {
        py::gil_scoped_release release;
        copy_bytes(at<void>(target), at<void>(source), nbytes);
      },
      arg("target"), arg("source"), arg("nbytes"));
}
