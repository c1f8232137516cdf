-- Moves results of a batch into a file that is not whole yet, as its next piece.
-- ARGV: id, gateway, id of the file, number of the piece, ms until it is dropped unless it becomes whole, the piece, line, ...
-- Returns 1, or 0 where the gateway does not lead it any more
local id, file, results = ARGV[1], ARGV[3], stored(ARGV[1]) .. ':results'
if not leads(id, ARGV[2]) then return 0 end
local size = 0
for i = 7, #ARGV do
  local result = redis.call('HGET', results, ARGV[i])
  if not result then return 0 end
  size = size + #ARGV[i] + #result
end
for i = 7, #ARGV do redis.call('HDEL', results, ARGV[i]) end
count_stored(id, -size)
redis.call('HSET', stored(file) .. ':pieces', ARGV[4], ARGV[6])
count_stored(file, #ARGV[6])
redis.call('ZADD', stored_expiry, math.floor(now_us() / 1000) + tonumber(ARGV[5]), file)
redis.call('HSET', stored(id), 'pieces:' .. file, tonumber(ARGV[4]) + 1)
return 1
