-- Which decoder is bound to which live scheduler. Returns {did, sid, ...}
local now_ms = math.floor(now_us() / 1000)
local bound = redis.call('HGETALL', P .. ':bound')
local answer = {}
for i = 1, #bound, 2 do
  local deadline = redis.call('ZSCORE', P .. ':scheds', bound[i + 1])
  if deadline and tonumber(deadline) >= now_ms then
    answer[#answer + 1] = bound[i]
    answer[#answer + 1] = bound[i + 1]
  end
end
return answer
