-- Says that requests are followed. ARGV: rid, ms that it lives on without a follower, ...
local now_ms = math.floor(now_us() / 1000)
for i = 1, #ARGV, 2 do
  local r = request(ARGV[i])
  local f = redis.call('HMGET', r, 'state', 'follow_until_ms')
  local until_ms = now_ms + tonumber(ARGV[i + 1])
  -- Of two followers, the one that lets it live longer counts.
  if f[1] and f[1] ~= 'ended' and until_ms > tonumber(f[2]) then
    redis.call('HSET', r, 'follow_until_ms', int(until_ms))
  end
end
return 1
