// Copies. What goes to the host arrives when it is waited for: until then the host finds a pattern no result has.
#include "runtime.h"

#include <algorithm>
#include <cstring>

namespace fake {

static constexpr int not_arrived = 0xEE;

static void to_host(Stream *stream, void *host, const void *device, size_t bytes) {
  count(is_pinned_memory(host) ? copy_d2h : copy_d2h_pageable);
  count(bytes_d2h, int64_t(bytes));
  auto from = static_cast<const char *>(device);
  stream->pending.push_back({host, device, bytes, true, {from, from + bytes}, stream->sequence});
  memset(host, not_arrived, bytes);
}

static void to_device(Stream *stream, void *device, const void *host, size_t bytes) {
  count(is_pinned_memory(host) ? copy_h2d : copy_h2d_pageable);
  count(bytes_h2d, int64_t(bytes));
  auto from = static_cast<const char *>(host);
  std::vector<char> content(from, from + bytes);
  // What an earlier copy of this stream brings to the host has arrived there by the time of this one.
  for (auto &copy : stream->pending) {
    if (!copy.to_host) continue;
    auto there = static_cast<const char *>(copy.host);
    auto begin = std::max(from, there), end = std::min(from + bytes, there + copy.bytes);
    if (begin < end) memcpy(content.data() + (begin - from), copy.content.data() + (begin - there), size_t(end - begin));
  }
  memcpy(device, content.data(), bytes);
  stream->pending.push_back({const_cast<void *>(host), device, bytes, false, content, stream->sequence});
}

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind) {
  fake::Lock lock(fake::mutex);
  FAKE_ALIVE;
  fake::count(fake::copy_blocking);
  memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream on) {
  fake::Lock lock(fake::mutex);
  FAKE_ALIVE;
  auto stream = fake::stream_of(on);
  stream->sequence++;
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST) {
    fake::to_host(stream, to, from, bytes);
  } else if (kind == ACL_MEMCPY_HOST_TO_DEVICE) {
    fake::to_device(stream, to, from, bytes);
  } else {
    fake::count(fake::copy_d2d);
    memmove(to, from, bytes);
  }
  return ACL_SUCCESS;
}

aclError aclrtMemset(void *place, size_t, int32_t value, size_t bytes) {
  memset(place, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *place, size_t, int32_t value, size_t bytes, aclrtStream) {
  return aclrtMemset(place, bytes, value, bytes);
}
}
