-- Registers an instance of a service as alive. ARGV: service, instance id, address ('' withdraws), ttl ms, ms after which one
-- that died without withdrawing is removed, what it says of the part of the model that it serves ('' is nothing), of a
-- decoder also the content of its checkpoint (hex) and how many ms ago it was loaded, what its bits depend on ('' is
-- nothing), and what it does at the moment, as JSON ('' is nothing)
local members, at = P .. ':instances:' .. ARGV[1], P .. ':addresses:' .. ARGV[1]
local numerics, loads = P .. ':numerics:' .. ARGV[1], P .. ':loads:' .. ARGV[1]
if ARGV[3] == '' then
  redis.call('ZREM', members, ARGV[2])
  redis.call('HDEL', at, ARGV[2])
  redis.call('HDEL', numerics, ARGV[2])
  redis.call('HDEL', loads, ARGV[2])
  redis.call('HDEL', P .. ':contents', ARGV[2])
  return 1
end
local now_ms = math.floor(now_us() / 1000)
redis.call('ZADD', members, now_ms + tonumber(ARGV[4]), ARGV[2])
redis.call('HSET', at, ARGV[2], ARGV[3])
if (ARGV[9] or '') ~= '' then redis.call('HSET', numerics, ARGV[2], ARGV[9]) end
if (ARGV[10] or '') ~= '' then redis.call('HSET', loads, ARGV[2], ARGV[10]) end
if (ARGV[6] or '') ~= '' then
  redis.call('HSET', P .. ':parts', ARGV[1], ARGV[6])
  redis.call('PEXPIRE', P .. ':parts', ARGV[5])
end
if (ARGV[7] or '') ~= '' then
  local loaded_ms = now_ms - tonumber(ARGV[8])
  if redis.call('HSETNX', P .. ':contents', ARGV[2], int(loaded_ms) .. ' ' .. ARGV[7]) == 1 then
    -- The latest gets the new requests at once where no scheduler has any yet; else once one has bound it (`sweep`).
    local meta = redis.call('HMGET', P .. ':meta', 'content', 'content_ms')
    local is_first = redis.call('EXISTS', P .. ':served') == 0 and tonumber(meta[2] or 0) <= loaded_ms
    if not meta[1] or is_first then
      redis.call('HSET', P .. ':meta', 'content', ARGV[7], 'content_ms', int(loaded_ms))
    end
  end
end
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', now_ms - tonumber(ARGV[5]))) do
  redis.call('ZREM', members, dead)
  redis.call('HDEL', at, dead)
  redis.call('HDEL', numerics, dead)
  redis.call('HDEL', loads, dead)
end
redis.call('PEXPIRE', members, ARGV[5])
redis.call('PEXPIRE', at, ARGV[5])
redis.call('PEXPIRE', numerics, ARGV[5])
redis.call('PEXPIRE', loads, ARGV[5])
return 1
