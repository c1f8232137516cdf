-- Binds a decoder to a scheduler by a number that only grows, also after Redis lost its tail.
-- ARGV: did, sid ('' sets it free), sid that frees it or ''.  Returns the lease, or 0 if another live scheduler has it
if redis.call('EXISTS', P .. ':hold') == 1 then return '0' end
local key = P .. ':lease:' .. ARGV[1]
local f = redis.call('HMGET', key, 'sid', 'lease')
local now = now_us()
if ARGV[2] == '' then
  if f[1] == ARGV[3] then redis.call('HSET', key, 'sid', '') end
  return '0'
end
if f[1] and f[1] ~= '' and f[1] ~= ARGV[2] then
  local deadline = redis.call('ZSCORE', P .. ':scheds', f[1])
  if deadline and tonumber(deadline) >= now / 1000 then return '0' end
end
local lease = math.max(tonumber(f[2] or 0) + 1, now)
redis.call('HSET', key, 'sid', ARGV[2], 'lease', int(lease))
redis.call('EXPIRE', key, 86400)
return int(lease)
