-- Gives up a gateway's leases on batches: another one may lead them at once.
-- ARGV: gateway, id of a batch that it leads, ...
-- Returns how many it led
local count = 0
for i = 2, #ARGV do
  if leads(ARGV[i], ARGV[1]) then
    redis.call('ZADD', open_batches, 0, ARGV[i])
    redis.call('HDEL', stored(ARGV[i]), 'leader')
    count = count + 1
  end
end
return count
