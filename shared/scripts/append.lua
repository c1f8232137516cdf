-- Writes the tokens and endings of one step, for many sequences, and tells followers in one message.
-- ARGV: sid, keep s, then for each: rid, choice, start (records), stride, records, ending or '', event
-- Returns for each two numbers: code (0 ok, 1 refused, 2 ok but cancelled, 3 gap), records in the log now
local sid, keep_s = ARGV[1], ARGV[2]
local answers, events = {}, {}
for i = 3, #ARGV, 7 do
  local rid, choice, stride, records, ending = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 3]), ARGV[i + 4], ARGV[i + 5]
  local start = tonumber(ARGV[i + 2])
  local r = request(rid)
  local f = redis.call('HMGET', r, 'owner', 'cancel', 'e' .. choice)
  local code, length = 0, 0
  if f[1] ~= sid or f[3] then
    code = 1
  else
    local log = P .. ':l:' .. rid .. ':' .. choice
    length = redis.call('STRLEN', log) / stride
    if start > length then
      code = 3
    else
      local fresh = string.sub(records, (length - start) * stride + 1)
      if #fresh > 0 then length = redis.call('APPEND', log, fresh) / stride end
      events[#events + 1] = ARGV[i + 6]
      if f[2] == '1' then code = 2 end
      if ending ~= '' then
        redis.call('HSET', r, 'e' .. choice, ending)
        if redis.call('HINCRBY', r, 'open', -1) <= 0 then retire(rid, keep_s) end
      end
    end
  end
  answers[#answers + 1] = code
  answers[#answers + 1] = length
end
if #events > 0 then redis.call('PUBLISH', P .. ':tok', table.concat(events)) end
return answers
