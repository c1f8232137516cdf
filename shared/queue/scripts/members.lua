-- Lists the live instances of a service. ARGV: service.  Returns {id, address, numerics or '', ...} in order of id
local now_ms = math.floor(now_us() / 1000)
local live = redis.call('ZRANGEBYSCORE', P .. ':instances:' .. ARGV[1], now_ms, '+inf')
table.sort(live)
local answer = {}
for _, id in ipairs(live) do
  answer[#answer + 1] = id
  answer[#answer + 1] = redis.call('HGET', P .. ':addresses:' .. ARGV[1], id)
  answer[#answer + 1] = redis.call('HGET', P .. ':numerics:' .. ARGV[1], id) or ''
end
return answer
