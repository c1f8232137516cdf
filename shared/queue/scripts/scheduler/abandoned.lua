-- Those of the given running requests that are cancelled, or that no gateway follows any more.
-- ARGV: grace ms after Redis was away, rids ...  Returns rids
local now_ms = math.floor(now_us() / 1000)
local up_since = up_since_ms(now_ms)
local found = {}
for i = 2, #ARGV do
  local f = redis.call('HMGET', request(ARGV[i]), 'cancel', 'follow_until_ms')
  if f[1] == '1' or followed_until(f[2], up_since, tonumber(ARGV[1])) <= now_ms then found[#found + 1] = ARGV[i] end
end
return found
