-- Serves a LoRA adapter by a name, or no longer. ARGV: name, digest ('' serves it no longer), folder, whether an adapter
-- that has the name already gives it up (1).
-- Returns {'OK', version of what is served, from now on} | {'TAKEN', digest that has the name} | {'MISSING'}
local names, folders = P .. ':adapters', P .. ':adapters:folders'
if ARGV[1] == '' then
  local now = redis.call('HGET', P .. ':meta', 'adapters_version') or '0'
  redis.call('HSETNX', folders, ARGV[2], now .. ' ' .. ARGV[3])
  return {'OK', now}
end
local before = redis.call('HGET', names, ARGV[1])
if ARGV[2] == '' and not before then return {'MISSING'} end
if ARGV[2] ~= '' and before and ARGV[4] ~= '1' then
  return {'TAKEN', string.match(before, '^%S+')}
end
local version = int(redis.call('HINCRBY', P .. ':meta', 'adapters_version', 1))
if ARGV[2] == '' then
  redis.call('HDEL', names, ARGV[1])
  return {'OK', version}
end
redis.call('HSET', names, ARGV[1], ARGV[2] .. ' ' .. version)
redis.call('HSET', folders, ARGV[2], version .. ' ' .. ARGV[3])
redis.call('DEL', P .. ':adapter:' .. ARGV[2])
-- Requests outlive the names of their adapters, and need the folder where a decoder has to read it again. Of very many
-- without a name the one that was given one longest ago is forgotten.
if redis.call('HLEN', folders) > redis.call('HLEN', names) + 1000 then
  local named, all = {}, redis.call('HGETALL', names)
  for i = 2, #all, 2 do named[string.match(all[i], '^%S+')] = true end
  local oldest, least
  all = redis.call('HGETALL', folders)
  for i = 1, #all, 2 do
    local since = tonumber(string.match(all[i + 1], '^%d+'))
    if not named[all[i]] and (not least or since < least) then oldest, least = all[i], since end
  end
  if oldest then redis.call('HDEL', folders, oldest) end
end
return {'OK', version}
