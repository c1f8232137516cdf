-- Binds a decoder to a scheduler by a number that only grows, also after Redis lost its tail.
-- ARGV: did, sid ('' sets it free), sid that frees it or ''.  Returns the lease, or 0 if another live scheduler has it
local did, sid = ARGV[1], ARGV[2]
local owner = redis.call('HGET', P .. ':bound', did)
if sid == '' then
  if owner == ARGV[3] then redis.call('HDEL', P .. ':bound', did) end
  return '0'
end
if redis.call('EXISTS', P .. ':recovery') == 1 then return '0' end
local now = now_us()
if owner and owner ~= sid then
  local deadline = redis.call('ZSCORE', P .. ':scheds', owner)
  if deadline and tonumber(deadline) >= now / 1000 then return '0' end
end
local lease = math.max(tonumber(redis.call('HGET', P .. ':leases', did) or 0) + 1, now)
redis.call('HSET', P .. ':bound', did, sid)
redis.call('HSET', P .. ':leases', did, int(lease))
return int(lease)
