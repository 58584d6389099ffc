// Cores that instances share: threads that compute prompts pause between two pieces of work while another process
// computes a step. No process waits for ever: a turn ends by itself at the time that its owner wrote down.
#pragma once

namespace baton {

// Call between two pieces of work, in the thread that does them. Costs a few loads while nobody else has the turn.
void yield_to_others();

}  // namespace baton
