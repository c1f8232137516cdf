-- Follows `waiting` in the script that refuses requests that would get their first token too late.

-- An estimate is a mean of few and unequal things: this share of the time that a request allows is planned with.
local PLANNED = 0.75

-- A request is reserved: if nobody else waits for a first token, what is measured until its own begins now.
local function begin_turn(now_ms)
  if redis.call('HLEN', P .. ':live') <= redis.call('SCARD', P .. ':begun') then
    redis.call('HSET', P .. ':meta', 'turn_since_ms', int(now_ms))
  end
end

-- How many requests come before a new one, in the queue and in all: those without a first token. Tenants take turns: what
-- others have waiting does not delay a tenant by more than their turns between its own.
local function num_ahead(prio, tenant)
  local running = 0
  for _, sid in ipairs(redis.call('ZRANGE', P .. ':scheds', 0, -1)) do
    running = running + redis.call('SCARD', P .. ':own:' .. sid)
  end
  local preparing = redis.call('ZCARD', P .. ':resv')
  local live = redis.call('HLEN', P .. ':live')
  local waiting = math.max(0, live - running - preparing)
  local taken = math.max(0, live - redis.call('SCARD', P .. ':begun') - waiting - preparing)
  if prio ~= 'batch' then
    -- Those that have waited longer than the goal come behind it, but for one turn in many.
    waiting = math.max(0, waiting - redis.call('ZCOUNT', P .. ':goal', '+inf', '+inf'))
    local own = redis.call('ZCARD', waiting_of(prio, tenant))
    local others = redis.call('ZCARD', P .. ':tenants:' .. prio) - (own > 0 and 1 or 0)
    local share = tonumber(redis.call('HGET', P .. ':weights', tenant) or 1)
    waiting = math.min(waiting, own * (1 + others / share))
  end
  return waiting + preparing, waiting + preparing + taken
end

-- Whether a new request would probably be taken, or get its first token, later than it allows (ms; 0 is any time): nil,
-- or which of the two, how long it may take, and after how long there is room for it (ms).
-- Where nobody waits for a first token nobody is refused, so that what was measured never keeps everything out.
local function too_late(prio, tenant, queue_ms, first_token_ms)
  if queue_ms == 0 and first_token_ms == 0 then return end
  local turn_ms = tonumber(redis.call('HGET', P .. ':meta', 'turn_ms') or 0)
  local in_queue, in_all = num_ahead(prio, tenant)
  if turn_ms == 0 or in_all == 0 then return end
  for _, limit in ipairs({
    {'queue_timeout', queue_ms, in_queue * turn_ms}, {'first_token_timeout', first_token_ms, (in_all + 1) * turn_ms}
  }) do
    local name, allowed, expected = unpack(limit)
    local excess = expected - PLANNED * allowed
    if allowed > 0 and excess > 0 then return name, expected / PLANNED, excess end
  end
end
