-- Returns requests to the head of the queue with their logs. ARGV: closing (6), sid, rid, decoders lost with it, ...
-- Returns how many were the caller's
local close = closing()
local returned = 0
for i = 8, #ARGV, 2 do
  if redis.call('HGET', request(ARGV[i]), 'owner') == ARGV[7] then
    keep_lost_decoders(ARGV[i], ARGV[i + 1])
    put_back(ARGV[i], close)
    returned = returned + 1
  end
end
return returned
