-- Adds errors that requests have ended with, and forgets old ones.
-- ARGV: how many are kept at the most, for how many ms, and of each: the error, how many ms ago it was
-- Returns 1
local errors, now_ms = P .. ':errors', math.floor(now_us() / 1000)
redis.call('ZREMRANGEBYSCORE', errors, '-inf', int(now_ms - tonumber(ARGV[2])))
for i = 3, #ARGV, 2 do
  redis.call('ZADD', errors, int(now_ms - tonumber(ARGV[i + 1])), ARGV[i])
end
local over = redis.call('ZCARD', errors) - tonumber(ARGV[1])
if over > 0 then
  for _, oldest in ipairs(redis.call('ZRANGE', errors, 0, over - 1)) do redis.call('ZREM', errors, oldest) end
end
redis.call('PEXPIRE', errors, ARGV[2])
return 1
