-- Returns requests to the head of the queue with their logs. ARGV: closing (6), sid, rids ...
-- Returns how many were the caller's
local close = closing()
local returned = 0
for i = 8, #ARGV do
  if redis.call('HGET', request(ARGV[i]), 'owner') == ARGV[7] then
    put_back(ARGV[i], close)
    returned = returned + 1
  end
end
return returned
