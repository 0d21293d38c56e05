// launch.h - kernel<<<grid, threads, shared, stream>>>(parameters) as a function call, which build.mk rewrites it to.
#pragma once
#include <tuple>

#include "emulate.h"

namespace emulate {

// Enqueues; an error of the launch becomes the thread's last error.
void launch_blocks(const void *kernel, const char *signature, int grid, int threads, size_t shared, cudaStream_t stream,
                   std::function<void()> body);
cudaError_t allow_shared(const void *kernel, cudaFuncAttribute what, int bytes);

template <class... P, class... A>
void launch(void (*kernel)(P...), int grid, int threads, size_t shared, cudaStream_t stream, const A &...parameters) {
  const auto all = std::make_shared<std::tuple<std::decay_t<P>...>>(parameters...);
  launch_blocks(reinterpret_cast<const void *>(kernel), __PRETTY_FUNCTION__, grid, threads, shared, stream,
                [kernel, all] { std::apply(kernel, *all); });
}

}  // namespace emulate

template <class... P>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, void (*)(P...)) {
  *attributes = {};
  return cudaSuccess;
}
template <class... P>
cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute what, int value) {
  return emulate::allow_shared(reinterpret_cast<const void *>(kernel), what, value);
}
