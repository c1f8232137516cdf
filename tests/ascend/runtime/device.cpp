// Which device there is, and what the runtime says about it.
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

namespace fake {

const char *soc() {
  const char *name = getenv("FAKE_NPU_SOC");
  return name && *name ? name : "Ascend910B4";
}

static uint32_t device_count() {
  const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!visible || !*visible) return setting("FAKE_NPU_COUNT", 1);
  std::string list(visible);
  return 1 + std::count(list.begin(), list.end(), ',');
}

static thread_local int current_device = 0;

}  // namespace fake

#pragma GCC visibility push(default)
extern "C" {

const char *aclrtGetSocName() { return fake::soc(); }
const char *aclGetRecentErrMsg() { return fake::report().message; }

aclError aclrtGetDeviceCount(uint32_t *number) {
  *number = fake::device_count();
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t *device) {
  *device = fake::current_device;
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || uint32_t(device) >= fake::device_count()) return ACL_ERROR_INVALID_PARAM;
  fake::current_device = device;
  return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
  *context = reinterpret_cast<void *>(16);
  return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t *value) {
  *value = what == ACL_DEV_ATTR_VECTOR_CORE_NUM ? 40 : 20;
  return ACL_SUCCESS;
}

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t *value) {
  *value = 0;
  return ACL_SUCCESS;
}

aclError aclrtCtxGetSysParamOpt(aclSysParamOpt, int64_t *value) {
  *value = 0;
  return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
  memset(version, 0, sizeof *version);
  strcpy(version->version, "9.1.0");
  return ACL_SUCCESS;
}
}
