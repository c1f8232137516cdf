-- Files and batches: a record each, counted together until they expire. The first part of an id says which of both it is.

local stored_expiry, stored_sizes, stored_total = P .. ':stored:expiry', P .. ':stored:sizes', P .. ':stored:total'
local open_batches = P .. ':batches:open'

local function stored(id) return P .. ':stored:' .. id end

-- Those of a tenant, by their age.
local function stored_of(id, tenant) return P .. ':stored:of:' .. string.match(id, '^%a+') .. ':' .. tenant end

local function count_stored(id, bytes)
  redis.call('HINCRBY', stored_sizes, id, bytes)
  redis.call('INCRBY', stored_total, bytes)
end

local function has_room(bytes, limit)
  return tonumber(redis.call('GET', stored_total) or 0) + bytes <= tonumber(limit)
end

local function drop_stored(id)
  redis.call('DECRBY', stored_total, redis.call('HGET', stored_sizes, id) or 0)
  local tenant = redis.call('HGET', stored(id), 'tenant')
  if tenant then redis.call('ZREM', stored_of(id, tenant), id) end
  redis.call('DEL', stored(id), stored(id) .. ':pieces', stored(id) .. ':results')
  redis.call('ZREM', stored_expiry, id)
  redis.call('HDEL', stored_sizes, id)
  redis.call('ZREM', open_batches, id)
end

local function drop_expired(now_ms)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', stored_expiry, '-inf', now_ms, 'LIMIT', 0, 100)) do drop_stored(id) end
end

-- Whether a gateway still leads a batch that has not ended.
local function leads(id, gateway)
  return redis.call('HGET', stored(id), 'leader') == gateway and redis.call('ZSCORE', open_batches, id)
end
