-- Takes requests whose traces are due. Each is given to one caller, once.
-- ARGV: how many at the most
-- Returns their rids.
local due, found = P .. ':traces', {}
for _, rid in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', int(math.floor(now_us() / 1000)), 'LIMIT', 0, ARGV[1])) do
  redis.call('ZREM', due, rid)
  if redis.call('EXISTS', request(rid)) == 1 and redis.call('HSETNX', request(rid), 'exported', 1) == 1 then
    found[#found + 1] = rid
  end
end
return found
