-- Returns requests to the head of the queue with their logs. ARGV: sid, cancelled ending, keep s, rids ...
local returned = 0
for i = 4, #ARGV do
  if redis.call('HGET', request(ARGV[i]), 'owner') == ARGV[1] then
    put_back(ARGV[i], ARGV[2], ARGV[3])
    returned = returned + 1
  end
end
return returned
