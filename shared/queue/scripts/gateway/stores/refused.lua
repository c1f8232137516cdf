-- Keeps the timelines of requests that were not accepted, and forgets the oldest.
-- ARGV: how many are kept at the most, for how many s, and of each: rid, tenant, head, chunk
-- Returns 1
local refusals, now_ms = P .. ':refusals', math.floor(now_us() / 1000)
local function kept(rid) return P .. ':refused:' .. rid end
for i = 3, #ARGV, 4 do
  local rid = ARGV[i]
  redis.call('HSET', kept(rid), 'tenant', ARGV[i + 1], 'head', ARGV[i + 2], 'chunk', ARGV[i + 3])
  redis.call('EXPIRE', kept(rid), ARGV[2])
  redis.call('ZADD', refusals, int(now_ms), rid)
end
redis.call('ZREMRANGEBYSCORE', refusals, '-inf', int(now_ms - 1000 * tonumber(ARGV[2])))
local over = redis.call('ZCARD', refusals) - tonumber(ARGV[1])
if over > 0 then
  for _, rid in ipairs(redis.call('ZRANGE', refusals, 0, over - 1)) do
    redis.call('DEL', kept(rid))
    redis.call('ZREM', refusals, rid)
  end
end
redis.call('EXPIRE', refusals, ARGV[2])
return 1
