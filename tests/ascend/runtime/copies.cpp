// Copies. They happen when the next kernel of their stream comes, or when somebody waits for them: so one that another
// stream should have waited for is late, and reads what came after it. What goes to the host arrives there when the host
// waits: until then it finds a pattern no result has.
#include "runtime.h"

#include <algorithm>
#include <cstring>

namespace fake {

static constexpr int not_arrived = 0xEE;

static void to_host(Stream *stream, char *host, char *device, size_t bytes) {
  count(is_pinned_memory(host) ? copy_d2h : copy_d2h_pageable);
  count(bytes_d2h, int64_t(bytes));
  access(stream, device, bytes, false);
  stream->pending.push_back({host, device, bytes, true, {}, stream->sequence, false});
  memset(host, not_arrived, bytes);
}

static void to_device(Stream *stream, char *device, char *host, size_t bytes) {
  count(is_pinned_memory(host) ? copy_h2d : copy_h2d_pageable);
  count(bytes_h2d, int64_t(bytes));
  access(stream, device, bytes, true);
  std::vector<char> content(host, host + bytes);
  // What an earlier copy of this stream brings to the host has arrived there by the time of this one.
  for (auto &copy : stream->pending) {
    auto begin = std::max(host, copy.host), end = std::min(host + bytes, copy.host + copy.bytes);
    if (!copy.to_host || begin >= end) continue;
    perform(stream, copy.sequence);
    memcpy(content.data() + (begin - host), copy.content.data() + (begin - copy.host), size_t(end - begin));
  }
  stream->pending.push_back({host, device, bytes, false, content, stream->sequence, false});
}

static void perform(PendingCopy &copy) {
  if (copy.happened) return;
  copy.happened = true;
  if (copy.to_host)
    copy.content.assign(copy.device, copy.device + copy.bytes);
  else
    memcpy(copy.device, copy.content.data(), copy.bytes);
}

void perform(Stream *stream, uint64_t until) {
  for (auto &copy : stream->pending)
    if (copy.sequence <= until) perform(copy);
}

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

aclError aclrtMemcpy(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind) {
  fake::Lock lock(fake::mutex);
  FAKE_ALIVE;
  fake::count(fake::copy_blocking);
  if (fake::is_device_memory(from)) fake::access(nullptr, from, bytes, false);
  if (fake::is_device_memory(to)) fake::access(nullptr, to, bytes, true);
  memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t, const void *from, size_t bytes, aclrtMemcpyKind kind, aclrtStream on) {
  fake::Lock lock(fake::mutex);
  FAKE_ALIVE;
  auto stream = fake::stream_of(on);
  stream->sequence++;
  auto target = static_cast<char *>(to), source = static_cast<char *>(const_cast<void *>(from));
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST) {
    fake::to_host(stream, target, source, bytes);
  } else if (kind == ACL_MEMCPY_HOST_TO_DEVICE) {
    fake::to_device(stream, target, source, bytes);
  } else {
    fake::count(fake::copy_d2d);
    fake::access(stream, source, bytes, false);
    fake::access(stream, target, bytes, true);
    fake::perform(stream, stream->sequence);
    memmove(target, source, bytes);
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
