"""Test the flags of elastic DiLoCo: rejected combinations, and the rules of a run that follow from the flags."""

import math

from helpers.refusals import not_refused, table
from helpers.small_run import check

from megazpp.elastic.config import ElasticConfig, ElasticPlan

GROUP = "--diloco-coordinator 127.0.0.1:29700 --diloco-steps 2 --diloco-replica-groups 3"


def test_flags_that_do_not_fit_are_rejected_by_name():
    rows = table("""
--diloco-coordinator 127.0.0.1:29700 --diloco-steps 2        | needs --diloco-replica-groups
--diloco-coordinator 10.0.0.1:29700                          | is not on this machine, and needs --diloco-secret-file
--diloco-coordinator nowhere                                 | --diloco-coordinator nowhere
--diloco-quorum 2                                            | --diloco-coordinator
--diloco-listen 10.0.0.2                                     | --diloco-coordinator
--diloco-advertise 10.0.0.2                                  | --diloco-coordinator
--diloco-min-groups 2                                        | --diloco-coordinator
GROUP --diloco-quorum 0                                      | --diloco-quorum 0
GROUP --diloco-min-groups 0                                  | --diloco-min-groups 0
GROUP --diloco-late-factor 1.5                               | --diloco-late-factor 1.5 is more than 1
GROUP --diloco-wait-for-all --diloco-grace 2                 | give only one
GROUP --diloco-secret-file no/such/file                      | --diloco-secret-file no/such/file
GROUP --diloco-listen 0.0.0.0                                | --diloco-listen 0.0.0.0 lets other machines connect
GROUP --diloco-advertise [::]                                | --diloco-advertise [::]: other groups cannot connect
GROUP --exit-interval 4                                      | does not support --exit-interval 4
GROUP --zero-stage 0                                         | --zero-stage 0
GROUP --num-distributed-optimizer-instances 2                | not support --num-distributed-optimizer-instances 2
""")
    rows = [(flags.replace("GROUP", GROUP), message) for flags, message in rows]
    assert not_refused(rows, lambda flags: check(flags, nodes=1, ranks_per_node=2)) == []


def test_plan_has_the_rules_that_the_flags_set():
    flags = "--diloco-quorum 2 --diloco-min-groups 2 --diloco-grace 4 --diloco-group a"
    plan = check(f"{GROUP} {flags}", nodes=1, ranks_per_node=2).of(ElasticPlan)
    assert (plan.rules.groups, plan.rules.interval, plan.rules.ranks) == (3, 2, 2)
    assert (plan.rules.quorum, plan.rules.min_groups, plan.rules.grace) == (2, 2, 4.0)
    waits = check(f"{GROUP} --diloco-wait-for-all", nodes=1, ranks_per_node=2).of(ElasticPlan)
    assert waits.rules.grace == math.inf
    assert check("", nodes=1, ranks_per_node=2).of(ElasticPlan) is None
    assert ElasticConfig().diloco_late_factor == 0.5
