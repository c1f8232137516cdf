-- What adapters are served. ARGV: version that the caller knows, the gateway that serves by it ('' is another service).
-- Returns {version} where that is the caller's | {version, {name, digest and version, ...}, {digest, version and folder, ...}}
local version = redis.call('HGET', P .. ':meta', 'adapters_version') or '0'
if version == ARGV[1] then
  local served = P .. ':adapters:served'
  if ARGV[2] ~= '' and redis.call('HGET', served, ARGV[2]) ~= version then
    redis.call('HSET', served, ARGV[2], version)
    redis.call('PEXPIRE', served, 600000)
  end
  return {version}
end
return {
  version,
  redis.call('HGETALL', P .. ':adapters'),
  redis.call('HGETALL', P .. ':adapters:folders'),
}
