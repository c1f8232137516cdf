-- How far an adapter has come. ARGV: digest ('' asks for gateways alone), version from which on it is served or not.
-- Returns {live gateways that serve by an older version, live decoders that have not said what became of it, {failures}}
local now_ms = int(math.floor(now_us() / 1000))
local behind, silent, failures = 0, 0, {}
for _, gateway in ipairs(redis.call('ZRANGEBYSCORE', P .. ':instances:gateway', now_ms, '+inf')) do
  local served = tonumber(redis.call('HGET', P .. ':adapters:served', gateway) or '-1')
  if served < tonumber(ARGV[2]) then behind = behind + 1 end
end
if ARGV[1] == '' then return {behind, 0, failures} end
for _, decoder in ipairs(redis.call('ZRANGEBYSCORE', P .. ':instances:decoder', now_ms, '+inf')) do
  local said = redis.call('HGET', P .. ':adapter:' .. ARGV[1], decoder)
  if not said then
    silent = silent + 1
  elseif said ~= '' then
    failures[#failures + 1] = said
  end
end
return {behind, silent, failures}
