-- Whether a group would fit if all ready groups were evicted. At most a few batches are leased.
local function fits_beside_leased(num_bytes, max_groups, max_bytes)
  local num_leased = redis.call('ZCARD', LEASED)
  if num_leased + 1 > max_groups or num_leased > MAX_BATCH then return false end
  if max_bytes == math.huge then return true end
  local total = num_bytes
  for _, id in ipairs(redis.call('ZRANGE', LEASED, '0', '-1')) do
    total = total + finite(fields_of(id, 'bytes')[1], 0)
  end
  return total <= max_bytes
end
