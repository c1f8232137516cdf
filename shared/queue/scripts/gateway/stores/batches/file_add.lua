-- Writes a piece of a file that is not whole yet. May be called again.
-- ARGV: id, number of the piece, the piece, limit of the bytes of all files and batches, ms until it is dropped unless it
--   becomes whole
-- Returns 1, or 0 where the limit would be passed
local id, piece = ARGV[1], ARGV[3]
local now_ms = math.floor(now_us() / 1000)
drop_expired(now_ms)
local pieces = stored(id) .. ':pieces'
if redis.call('HEXISTS', pieces, ARGV[2]) == 0 then
  if not has_room(#piece, ARGV[4]) then return 0 end
  redis.call('HSET', pieces, ARGV[2], piece)
  count_stored(id, #piece)
end
redis.call('ZADD', stored_expiry, now_ms + tonumber(ARGV[5]), id)
return 1
