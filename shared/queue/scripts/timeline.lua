-- Adds what a process has seen of requests to those that are known. It is kept with the request, and as long.
-- ARGV: chunks of a request at the most, and of each: rid, chunk, in how many ms its trace is due (-1: not by this)
-- Returns the time in us.
local now, most = now_us(), tonumber(ARGV[1])
for i = 2, #ARGV, 3 do
  local rid, due_ms = ARGV[i], tonumber(ARGV[i + 2])
  local r = request(rid)
  if redis.call('EXISTS', r) == 1 then
    local count = redis.call('HINCRBY', r, 'seen', 1)
    if count <= most then redis.call('HSET', r, 'seen' .. count, ARGV[i + 1]) end
    if due_ms >= 0 and redis.call('HEXISTS', r, 'exported') == 0 then
      local due, known = math.floor(now / 1000) + due_ms, redis.call('ZSCORE', P .. ':traces', rid)
      if not known or due < tonumber(known) then redis.call('ZADD', P .. ':traces', int(due), rid) end
    end
  end
end
return int(now)
