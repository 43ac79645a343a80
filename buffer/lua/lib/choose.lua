-- Chooses the groups of a batch, and tells how long to wait for more.

-- Whether an id may have been pushed: UTF-8 without white space and colons. (The patterns also accept
-- some invalid code points.)
local function is_id(id)
  if string.find(id, '[%s%c:]') then return false end
  if not string.find(id, '[\128-\255]') then return true end
  local rest = string.gsub(id, '[\194-\223][\128-\191]', '')
  rest = string.gsub(rest, '[\224-\239][\128-\191][\128-\191]', '')
  rest = string.gsub(rest, '[\240-\244][\128-\191][\128-\191][\128-\191]', '')
  return not string.find(rest, '[\128-\255]')
end

-- With on_stale=wait, the oldest running group if a step at `version` has to wait for it: it would be too
-- old afterwards, or it is of a crowd that the later steps could not all take in time, while this step
-- has places left for it.
local function blocking_group(version)
  if on_stale ~= 'wait' then return '', 0 end
  local oldest = redis.call('ZRANGE', RUNNING, '0', '0', 'WITHSCORES')
  if not oldest[1] then return '', 0 end
  local at, brink = finite(oldest[2], 0), oldest_fresh(version)
  if at <= brink then return oldest[1], at end
  local share = groups_per_version() / math.max(1, setting('num_shards'))
  local num_running = redis.call('ZCARD', RUNNING)
  for later = at - brink, max_staleness - 1 do -- steps after this one that may take groups up to `last`
    if num_running <= later * share then break end
    local last = brink + later
    local num_ready = redis.call('ZCOUNT', READY, '-inf', '(' .. whole((last + 1) * SEQ_RANGE))
    if num_ready < share and redis.call('ZCOUNT', RUNNING, '-inf', whole(last)) > later * share then
      return oldest[1], at
    end
  end
  return '', 0
end

-- At most `limit` ready groups in the selector's order, as {key, id} (smallest key first).
-- With selector=shortest or on_stale=wait, groups that would be too old at the next version come
-- first. Ids that no push could have stored are dropped; the second result tells whether there were any.
local function choose(version, limit)
  limit = math.min(finite(limit, 0), MAX_BATCH)
  local chosen, seen, was_damaged = {}, {}, false
  local function add(found, offset, sign)
    for i = 1, #found, 2 do
      if not is_id(found[i]) then
        was_damaged = true
        leave_ready({found[i]})
        drop({found[i]}, 'damaged')
      elseif not seen[found[i]] and #chosen < limit then
        seen[found[i]] = true
        chosen[#chosen + 1] = {whole(sign * found[i + 1] + offset), found[i]}
      end
    end
  end
  if selector == 'shortest' or (on_stale == 'wait' and selector ~= 'stalest') then
    local brink = '(' .. whole((oldest_fresh(version) + 1) * SEQ_RANGE)
    add(redis.call('ZRANGE', READY, '-inf', brink, 'BYSCORE', 'LIMIT', '0', limit, 'WITHSCORES'),
      -2 ^ 53, 1)
  end
  local last = limit - 1
  if has_order then add(redis.call('ZRANGE', ORDER, '0', last, 'WITHSCORES'), 0, 1) end
  if selector == 'freshest' then
    add(redis.call('ZRANGE', READY, '0', last, 'REV', 'WITHSCORES'), 0, -1)
  elseif #chosen < limit then -- also those missing in `order`
    add(redis.call('ZRANGE', READY, '0', last, 'WITHSCORES'), 0, 1)
  end
  return chosen, was_damaged
end

-- Milliseconds until the next lease of this shard expires, -1 if there is none. During a takeover none
-- expires; its end wakes the waiters.
local function until_expiry()
  if is_reconciling then return -1 end
  local first = redis.call('ZRANGE', LEASED, '0', '0', 'WITHSCORES')
  local deadline = finite(first[2])
  return deadline and math.max(1, deadline - now_ms() + 1) or -1
end
