-- Ends those of the given requests that wait and whose time is up. ARGV: closing (6), rids ...  Returns their rids
local close = closing()
local now_ms = math.floor(now_us() / 1000)
local up_since = up_since_ms(now_ms)
local ended = {}
-- While Redis recovers, one that seems to wait may be running: its owner is about to say so.
if redis.call('EXISTS', P .. ':recovery') == 1 then return ended end
for i = 7, #ARGV do
  if redis.call('HGET', request(ARGV[i]), 'state') == 'queued' and end_if_due(ARGV[i], now_ms, up_since, close) then
    ended[#ended + 1] = ARGV[i]
  end
end
return ended
