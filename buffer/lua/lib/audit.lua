-- The audit stream, for `make trace`.

local EVENTS = PREFIX .. 'events'
local MAX_AUDIT_IDS = 32 -- groups in one entry
local audit_length = finite(held_settings[8], 0)

-- Records an event of some groups. Groups share entries because an entry costs more than an id in it:
-- about four events per entry in a run's usual mix of single groups and whole batches.
-- Details come as name, value: s(tep) v(ersion) r(eason) o(wner: a lease token) p(rompt).
local function audit(ids, event, ...)
  if audit_length == 0 then return end
  local max_entries = whole(math.max(0, math.ceil(audit_length / 4)))
  for first = 1, #ids, MAX_AUDIT_IDS do
    redis.call('XADD', EVENTS, 'MAXLEN', '~', max_entries, '*',
      'g', table.concat(ids, ' ', first, math.min(first + MAX_AUDIT_IDS - 1, #ids)), 'e', event, ...)
  end
end
