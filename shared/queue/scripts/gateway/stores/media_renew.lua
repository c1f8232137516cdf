-- Keeps counting media items whose bytes were given more time. ARGV: ttl ms, digests ...
local expires_ms = math.floor(now_us() / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do
  redis.call('ZADD', P .. ':expiry', 'XX', expires_ms, ARGV[i])
end
return 1
