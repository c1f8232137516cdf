-- Lists the live instances of a room. ARGV: room.  Returns {id, address, ...} in order of id
local now_ms = math.floor(now_us() / 1000)
local live = redis.call('ZRANGEBYSCORE', P .. ':room:' .. ARGV[1], now_ms, '+inf')
table.sort(live)
local answer = {}
for _, id in ipairs(live) do
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGET', P .. ':at:' .. ARGV[1], id)
end
return answer
