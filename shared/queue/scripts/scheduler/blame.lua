-- Counts one more decoder that was lost while it computed these requests, whoever owns them now. ARGV: rid, ...
for _, rid in ipairs(ARGV) do
  local state = redis.call('HGET', request(rid), 'state')
  if state and state ~= 'ended' then redis.call('HINCRBY', request(rid), 'lost_decoders', 1) end
end
return 1
