-- leased -> consumed, for the groups that this lease still holds.
-- Request: lease_token, step, version (trained), mask_below_version (or none), group_ids.
-- Reply: number of groups consumed by this lease (the same on a repeated call).
-- Without groups only the step's record is marked as done: its groups are in other shards.
local lease_token, step, version = request.lease_token, request.step, request.version
if is_reconciling then return 0 end -- the lease is of a lineage that was rolled back
local total, ids, steps, largest = 0, {}, {}, nil
local trained, masked_out, num_bytes, total_age_ms, by_staleness = 0, 0, 0, 0, {}

-- Bounds in seconds of the histogram of ages; the counters are not cumulative.
local function age_bucket(age_s)
  for _, bound in ipairs({1, 5, 15, 60, 300, 900, 3600}) do if age_s <= bound then return bound end end
  return 'inf'
end

for _, id in ipairs(request.group_ids) do
  local group = fields_of(id, 'state', 'lease_token', 'min_version', 'trainable', 'versions', 'bytes',
    'pushed_at')
  if group[2] == lease_token and group[1] == 'consumed' then
    total = total + 1
  elseif group[2] == lease_token and group[1] == 'leased' then
    ids[#ids + 1] = id
    steps[#steps + 1] = step
    steps[#steps + 1] = id
    redis.call('HSET', group_key(id), 'state', 'consumed', 'leases', 0) -- trained, so it is usable
    local trainable = finite(group[4], 0)
    local oldest, masked = oldest_trained(group[3] or version, group[5], trainable, request.mask_below_version)
    local age_ms, staleness = math.max(0, now_ms() - finite(group[7], now_ms())), version - oldest
    trained, masked_out = trained + trainable - masked, masked_out + masked
    num_bytes, total_age_ms = num_bytes + finite(group[6], 0), total_age_ms + age_ms
    by_staleness[staleness] = (by_staleness[staleness] or 0) + 1
    count('trained_age:' .. age_bucket(age_ms / 1000), 1)
    largest = math.max(largest or staleness, staleness)
    total = total + 1
  end
end

if #ids > 0 then
  call_many('ZREM', LEASED, ids)
  call_many('ZADD', key('consumed'), steps)
  audit(ids, 'consumed', 's', step)
  count('tokens_trained', trained)
  count('tokens_masked', masked_out)
  count('bytes_consumed', num_bytes)
  count('trained_age_ms', total_age_ms)
  for staleness, number in pairs(by_staleness) do count('trained_staleness:' .. whole(staleness), number) end
  local before = finite(redis.call('HGET', STATS, 'max_staleness_trained'))
  if not before or largest > before then
    redis.call('HSET', STATS, 'max_staleness_trained', whole(largest))
  end
  wake('room')
end
local record = key('lease:' .. step)
if (total > 0 or #request.group_ids == 0) and redis.call('HGET', record, 'lease_token') == lease_token then
  redis.call('HSET', record, 'done', '1')
end
return total
