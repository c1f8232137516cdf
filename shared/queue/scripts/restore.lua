-- Puts a request back as far as the caller knows more of it than Redis, which has lost its last writes in a restart.
-- ARGV: closing (6), request (16), sid or '' for a gateway, own_at, lease ms, arrived ms, rank, prompt log,
--   decoders lost with it, the content that its logs were computed with or '', the numerics that they were begun in or '',
--   whether they are inexact (0, 1), log0, e0, log1, e1, ...
-- Returns 1, or 0: refused (no recovery; another owner took it later; its logs are not as the caller knows them; it ended)
-- The recovery may be over before a call gets through. At any time a gateway may put back what is missing altogether, and
-- an owner goes on with what is still its own here: nobody else can have written for it.
local close, q = closing(), request_at(7)
local sid, own_at, lease_ms, arrived_ms, rank = ARGV[23], tonumber(ARGV[24]), tonumber(ARGV[25]), ARGV[26], ARGV[27]
local lost_decoders, content, numerics, inexact, LOGS = ARGV[29], ARGV[30], ARGV[31], tonumber(ARGV[32]), 33
local rid, r = q.rid, request(q.rid)
local f = redis.call('HMGET', r, 'state', 'owner', 'own_at')
local state, owner = f[1], f[2] or ''
local may_be_late = sid == '' and not state or sid ~= '' and owner == sid
if not may_be_late and redis.call('EXISTS', P .. ':recovery') == 0 then return 0 end
local now_ms = math.floor(now_us() / 1000)
local logs = {p = ARGV[28]}
for c = 0, q.n - 1 do logs[c] = ARGV[LOGS + 2 * c] end

-- Of what Redis has and what the caller knows, the shorter must be the beginning of the longer.
local function agrees()
  for c, known in pairs(logs) do
    local there = redis.call('GET', log_of(rid, c)) or ''
    local both = math.min(#there, #known)
    if string.sub(there, 1, both) ~= string.sub(known, 1, both) then return false end
  end
  return true
end

local function extend()
  for c, known in pairs(logs) do
    if #known > 0 then note_origin(rid, content, numerics, inexact) end
    local length = redis.call('STRLEN', log_of(rid, c))
    if #known > length then redis.call('APPEND', log_of(rid, c), string.sub(known, length + 1)) end
    if c ~= 'p' and #known > 0 then redis.call('SADD', P .. ':begun', rid) end
  end
  for c = 0, q.n - 1 do
    local ending = ARGV[LOGS + 2 * c + 1]
    if ending ~= '' and redis.call('HSETNX', r, 'e' .. c, ending) == 1 then redis.call('HINCRBY', r, 'open', -1) end
  end
end

local function own(owner)
  if owner ~= '' then redis.call('SREM', P .. ':own:' .. owner, rid) end
  redis.call('HSET', r, 'state', 'running', 'owner', sid, 'own_at', int(own_at))
  if redis.call('HGET', r, 'taken_ms') == '0' then
    redis.call('HSET', r, 'taken_ms', int(math.floor(own_at / 1000)), 'attempts', 1)
  end
  redis.call('SADD', P .. ':own:' .. sid, rid)
  -- Its registration may be among what was lost; unlisted, it would never be fenced off.
  redis.call('ZADD', P .. ':scheds', 'NX', now_ms + lease_ms, sid)
end

if state == 'ended' then
  for c = 0, q.n - 1 do
    if ARGV[LOGS + 2 * c + 1] == '' and sid ~= '' then return 0 end
  end
  return 1
end
if sid ~= '' and owner ~= '' and owner ~= sid and tonumber(f[3]) >= own_at then return 0 end
if not agrees() then
  if sid ~= '' and owner == sid then
    keep_lost_decoders(rid, lost_decoders)
    put_back(rid, close)
  end
  return 0
end
if not state then create(q, now_ms, tonumber(arrived_ms), tonumber(rank)) end
keep_lost_decoders(rid, lost_decoders)
bind_key(q)
extend()
if state == 'queued' then
  note_begun(rid)
  keep_place(rid)
end
if tonumber(redis.call('HGET', r, 'open')) <= 0 then
  dequeue(rid)
  retire(rid, close.keep_s)
elseif sid ~= '' then
  dequeue(rid)
  own(owner)
elseif not state then
  enqueue(rid, q.prio, q.tenant, rank, close)
end
return 1
