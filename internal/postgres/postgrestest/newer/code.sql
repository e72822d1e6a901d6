-- Functions such as a later release may have. Each function on which no object of the catalog depends is replaced by
-- one with a further parameter, which has a default.
DO $$
DECLARE
    v_function record;
    v_changed  integer := 0;
BEGIN
    FOR v_function IN
        SELECT p.oid, p.oid::regprocedure AS signature, p.proname, p.prokind, pg_get_functiondef(p.oid) AS definition,
            pg_get_function_arguments(p.oid) AS arguments, obj_description(p.oid, 'pg_proc') AS description
        FROM pg_proc p
        WHERE p.pronamespace = 'dlq'::regnamespace AND p.prokind = 'f' AND p.prorettype <> 'trigger'::regtype
          AND p.provariadic = 0
          -- dlq.set_capture and dlq.install_roles name these with their parameters.
          AND p.proname NOT IN ('capture_mode', 'capture_limit', 'scope', 'in_scope', 'in_patterns', 'scope_patterns',
              'like_patterns', 'scope_within', 'act_in_scope', 'breaker_in_scope', 'caller', 'to_uuid')
          AND (SELECT count(*) = 1 FROM pg_proc o WHERE o.pronamespace = p.pronamespace AND o.proname = p.proname)
          AND NOT 'p_newer' = ANY (coalesce(p.proargnames, '{}'))
          AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid = p.oid)
    LOOP
        EXECUTE format('DROP FUNCTION %s', v_function.signature);
        EXECUTE replace(v_function.definition, format('.%I(%s)', v_function.proname, v_function.arguments),
            format('.%I(%sp_newer text DEFAULT NULL)', v_function.proname,
                CASE WHEN v_function.arguments <> '' THEN v_function.arguments || ', ' ELSE '' END));
        EXECUTE format('COMMENT ON FUNCTION dlq.%I IS %L', v_function.proname, v_function.description);
        v_changed := v_changed + 1;
    END LOOP;
    RAISE NOTICE 'changed % functions', v_changed;
END
$$;
SELECT dlq.install_roles();
