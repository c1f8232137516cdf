-- Writes the records and endings of one step, for many sequences, and publishes for followers the message that it got.
-- ARGV: sid, keep s, a serialized LogBatch
-- Returns three numbers for each event that was not simply appended: its index, a code (0 ok: some of it was there
-- before, 1 refused, 2 ok but cancelled, 3 gap), records in the log now
local sid, keep_s, batch = ARGV[1], ARGV[2], ARGV[3]
local answers = {}
local first_tokens = 0  -- requests that get theirs now

-- The fields of the LogEvent between two indices, by number.
local function read_event(at, stop)
  local event = {'', 0, 0, '', '', 0, '', '', 0}
  while at < stop do
    local key, value
    key, at = varint_at(batch, at)
    value, at = varint_at(batch, at)
    if key % 8 == 2 then
      local first = at
      at = at + value
      value = string.sub(batch, first, at - 1)
    end
    event[math.floor(key / 8)] = value
  end
  return unpack(event)
end

-- The same for what nearly every event is, one token of the first choice: a fixed form (token_middle in
-- shared/queue/log_event.py), read at once. Returns nothing for any other event.
local function read_token(at, stop)
  local tag, length = string.byte(batch, at, at + 1)
  if tag ~= 10 or stop - at ~= length + 13 then return end
  local middle = at + 2 + length
  local start_tag, a, b, c, d, records_tag, size = string.byte(batch, middle, middle + 6)
  if start_tag ~= 24 or a < 128 or b < 128 or c < 128 or d >= 128 then return end
  if records_tag ~= 34 or size ~= 4 then return end
  local start = a - 128 + 128 * (b - 128) + 16384 * (c - 128) + 2097152 * d
  return string.sub(batch, at + 2, middle - 1), start, string.sub(batch, middle + 7, stop - 1)
end

local function note_first_token(rid)
  redis.call('HSETNX', request(rid), 'first_token_ms', int(math.floor(now_us() / 1000)))
  first_tokens = first_tokens + redis.call('SADD', P .. ':begun', rid)
end

-- Keeps the mean time from one request's first token to the next one's while others were waiting for theirs: the pace
-- at which `reserve` expects those that wait to be served. Neither decoders nor lengths of prompts need to be known for it.
local function learn_turn()
  local now_ms = math.floor(now_us() / 1000)
  local f = redis.call('HMGET', P .. ':meta', 'turn_ms', 'turn_since_ms')
  if f[2] then
    local turn = math.max(1, (now_ms - f[2]) / first_tokens)
    -- A pause, of a decoder that starts anew, is not the pace: one turn counts as no more than eight usual ones.
    if f[1] then turn = f[1] + (math.min(turn, 8 * f[1]) - f[1]) * math.min(1, first_tokens / 16) end
    redis.call('HSET', P .. ':meta', 'turn_ms', string.format('%.3f', turn))
  end
  if redis.call('HLEN', P .. ':live') > redis.call('SCARD', P .. ':begun') then
    redis.call('HSET', P .. ':meta', 'turn_since_ms', int(now_ms))
  else
    redis.call('HDEL', P .. ':meta', 'turn_since_ms')
  end
end

-- Puts records behind those of a log, at index `start`: how many were there before, and how many are there now. What is
-- already there is left as it is; behind a gap nothing is put. Records nearly always follow what is there: APPEND says
-- whether they did, and nothing is asked before.
local function extend(log, start, records, stride)
  if #records == 0 then
    local length = redis.call('STRLEN', log) / stride
    return length, length
  end
  local now = redis.call('APPEND', log, records) / stride
  local before = now - #records / stride
  if start == before then return before, now end
  if before == 0 then
    redis.call('DEL', log)
  else
    redis.call('SET', log, redis.call('GETRANGE', log, 0, before * stride - 1))
  end
  local fresh = start < before and string.sub(records, (before - start) * stride + 1) or ''
  if fresh == '' then return before, before end
  return before, redis.call('APPEND', log, fresh) / stride
end

-- Returns the code, the length of the log, whether followers are notified, and whether the event was simply appended.
local function write(rid, choice, start, records, ending, stride, content, numerics, inexact)
  if stride == 0 then stride = 4 end
  if choice > 2147483647 then choice = 'p' end  -- -1, as a varint of 64 bits
  local r = request(rid)
  local f = redis.call('HMGET', r, 'owner', 'cancel', 'e' .. choice)
  if f[1] ~= sid then return 1, 0, false, false end
  local log = log_of(rid, choice)
  if f[3] then return 0, redis.call('STRLEN', log) / stride, false, false end  -- ended before: it was sent twice
  local before, length = extend(log, start, records, stride)
  if start > before then return 3, before, false, false end
  if length > before then
    -- From its first record on it is computed with these weights alone.
    if before > 0 then content, numerics = '', '' end
    note_origin(rid, content, numerics, inexact)
    if before == 0 and choice ~= 'p' then note_first_token(rid) end
  end
  if ending ~= '' then
    redis.call('HSET', r, 'e' .. choice, ending)
    if redis.call('HINCRBY', r, 'open', -1) <= 0 then retire(rid, keep_s) end
  end
  return f[2] == '1' and 2 or 0, length, true, start == before and f[2] ~= '1'
end

local function write_at(at, stop)
  local rid, start, records = read_token(at, stop)
  if rid then return write(rid, 0, start, records, '', 4, '', '', 0) end
  return write(read_event(at, stop))
end

local index, at = 0, 1
local published  -- the events that followers are notified of, once these are fewer than all
while at <= #batch do
  local begin = at
  local size
  size, at = varint_at(batch, at + 1)
  local code, length, is_new, simple = write_at(at, at + size)
  at = at + size
  if not simple then
    answers[#answers + 1] = index
    answers[#answers + 1] = code
    answers[#answers + 1] = length
  end
  if not is_new and not published then published = {string.sub(batch, 1, begin - 1)} end
  if is_new and published then published[#published + 1] = string.sub(batch, begin, at - 1) end
  index = index + 1
end
if first_tokens > 0 then learn_turn() end
if published then batch = table.concat(published) end
if batch ~= '' then redis.call('PUBLISH', P .. ':tok', batch) end
return answers
