-- consumed -> acked, for steps up to one whose checkpoint is durable; deletes payloads.
-- Request: step, lineage ('' for any), bound (of work).
-- Reply: Acked: how many were acknowledged, 1 if there may be more | nil: another lineage took over
if request.lineage ~= '' and request.lineage ~= lineage then return nil end
local bound, acked_step = bound_of(request.bound), setting('acked_step')
local consumed = key('consumed')
local due = redis.call('ZRANGE', consumed, '-inf', request.step, 'BYSCORE', 'LIMIT', '0', bound, 'WITHSCORES')
local ids, by_step, newest = {}, {}, acked_step
for i = 1, #due, 2 do
  local id, step = due[i], due[i + 1]
  ids[#ids + 1] = id
  by_step[step] = by_step[step] or {}
  table.insert(by_step[step], id)
  newest = math.max(newest, finite(step, newest))
end
if #ids > 0 then
  local num_bytes = to_tombstones(ids, 'acked')
  call_many('ZREM', consumed, ids)
  count('bytes_consumed', -num_bytes)
  count('acked', #ids)
  for step, acked in pairs(by_step) do audit(acked, 'acked', 's', step) end
end
-- The records of these steps are no longer needed: late ranks are answered by `acked_step`.
local steps = redis.call('ZRANGE', BATCHES, '-inf', request.step, 'BYSCORE', 'LIMIT', '0', bound)
for _, step in ipairs(steps) do
  if finite(step, newest) > newest and redis.call('HEXISTS', lease_key(step), 'done') == 1 then
    newest = finite(step)
  end
end
local num_forgotten = 0
for _, step in ipairs(steps) do
  if finite(step, newest) <= newest then
    forget_batch(step)
    num_forgotten = num_forgotten + 1
  end
end
if newest > acked_step then redis.call('HSET', SETTINGS, 'acked_step', whole(newest)) end
return {#ids, (#ids == bound or num_forgotten == bound) and 1 or 0}
