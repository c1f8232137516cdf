-- Removes a scheduler whose lease has run out and puts back all it owned. Checks the deadline itself.
-- ARGV: closing (6), dead sid, the deadline (ms) seen before.  Returns how many went back, or -1 if refused
local close, dead = closing(), ARGV[7]
if redis.call('EXISTS', P .. ':recovery') == 1 then return -1 end
local deadline = redis.call('ZSCORE', P .. ':scheds', dead)
if not deadline or tonumber(deadline) ~= tonumber(ARGV[8]) then return -1 end
if tonumber(deadline) >= now_us() / 1000 then return -1 end
redis.call('ZREM', P .. ':scheds', dead)
redis.call('HDEL', P .. ':load', dead)
redis.call('HDEL', P .. ':served', dead)
local rids = redis.call('SMEMBERS', P .. ':own:' .. dead)
table.sort(rids)
for _, rid in ipairs(rids) do put_back(rid, close) end
redis.call('DEL', P .. ':own:' .. dead)
return #rids
