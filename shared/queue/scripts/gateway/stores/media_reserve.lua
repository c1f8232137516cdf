-- Counts a media item before its bytes are written. ARGV: digest, bytes, ttl ms, limit of all bytes.
-- Returns 1, or 0 when the limit would be passed.
local expiry, sizes, total_key = P .. ':expiry', P .. ':sizes', P .. ':total'
local now_ms = math.floor(now_us() / 1000)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', expiry, '-inf', now_ms, 'LIMIT', 0, 1000)) do
  redis.call('DECRBY', total_key, redis.call('HGET', sizes, gone))
  redis.call('ZREM', expiry, gone)
  redis.call('HDEL', sizes, gone)
end
if redis.call('HEXISTS', sizes, ARGV[1]) == 0 then
  local total = tonumber(redis.call('GET', total_key) or '0')
  if total + tonumber(ARGV[2]) > tonumber(ARGV[4]) then
    return 0
  end
  redis.call('HSET', sizes, ARGV[1], ARGV[2])
  redis.call('INCRBY', total_key, ARGV[2])
end
redis.call('ZADD', expiry, now_ms + tonumber(ARGV[3]), ARGV[1])
return 1
