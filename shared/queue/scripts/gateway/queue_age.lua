-- Looks at the queue, for metrics: {requests that wait, us since the oldest of them arrived}. It reads one entry for each
-- tenant with waiting work.
local waiting, oldest = 0, nil
for _, prio in ipairs({'interactive', 'batch'}) do
  for _, tenant in ipairs(redis.call('ZRANGE', P .. ':tenants:' .. prio, 0, -1)) do
    for _, key in ipairs({waiting_of(prio, tenant), late_of(prio, tenant)}) do
      local first = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
      if first[2] then
        waiting = waiting + redis.call('ZCARD', key)
        oldest = math.min(oldest or math.huge, tonumber(first[2]))
      end
    end
  end
end
-- A request that its client has put behind others has arrived later than now.
return {waiting, int(oldest and math.max(0, now_us() - oldest) or 0)}
